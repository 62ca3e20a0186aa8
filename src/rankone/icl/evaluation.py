"""Adjusted evaluation loss: half the squared error, exact over the query, minus the oracle's.

The oracle is ridge regression with the prompt's true noise. Everything is in float64 on shared
prompts, so differences between predictors have small errors. Records are flat dictionaries, see
`rankone.report.records`.

A trained model is a polynomial of the prompt, of a degree that grows as 3^layers, and explodes on
prompts with one very large eigenvalue. Whether 100,000 prompts hold one is chance, so a published
mean is a draw from a distribution with a long tail. Models are therefore scored on several draws,
and the median draw is what is reported (`typical`); `expected_problem` estimates the mean itself,
which is often larger by orders of magnitude, from importance-weighted prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from rankone.icl.baselines import Spectrum, bayes_coefficients, tune_constant, tune_ridge
from rankone.icl.ensemble import Run
from rankone.icl.gradients import choose
from rankone.icl.model import LinearTransformer
from rankone.tasks.noise import Fixed, Noise
from rankone.tasks.regression import NoisyRegression

Record = dict[str, Any]

PUBLISHED_SEQUENCES = 100_000
"""Sequences, with one query each, behind every number of the published table."""

SPIKES = (1.5, 2.0, 2.5, 3.0)
STREAM = 2048
"""Spiked prompts that are weighted together; the cost of the weights is quadratic in it."""


def weights_after_layers(
    model: LinearTransformer, gram: Float[Tensor, "B D D"]
) -> Float[Tensor, "B L1 d"]:
    """Implicit weights after 0, 1, …, L layers, by the fastest way there is on the device."""
    with torch.no_grad():
        if choose("auto", gram.device, model.dim)[0] == "fused_cpu":
            from rankone.icl.gradients.fused_cpu import weights_after_layers as fused

            P, Q = (matrix[None].to(gram) for matrix in model.matrices())
            return fused(P, Q, gram[None], torch.zeros(1, dtype=torch.long))[0]
        model = deepcopy(model).to(gram)  # the caller's stays where it is
        parts = [
            model.implicit_weights(part, every_layer=True) for part in torch.split(gram, 32768)
        ]
        return torch.cat(parts)


@dataclass
class Problem:
    """Prompts of one noise distribution, with what every predictor is compared to."""

    name: str
    """Name of the noise distribution."""
    noise: Noise
    context: int
    gram: Float[Tensor, "B D D"]
    weights: Float[Tensor, "B d"]
    sigma: Float[Tensor, " B"]
    importance: Float[Tensor, " B"] | None = None
    """Weights of the prompts; None if all count alike."""

    @cached_property
    def spectrum(self) -> Spectrum:
        """The Gram matrices' eigenbasis."""
        return Spectrum.of(self.gram)

    @cached_property
    def truth(self) -> Float[Tensor, "B d"]:
        """True weights in the eigenbasis."""
        return self.spectrum.unrotate(self.weights)

    @cached_property
    def oracle_error(self) -> Float[Tensor, "B d"]:
        """Error of the oracle's weights, in the features' basis."""
        return self.spectrum.rotate(self.spectrum.ridge(self.sigma**2) - self.truth)

    @cached_property
    def oracle_loss(self) -> Float[Tensor, " B"]:
        """The loss that is subtracted from all others."""
        return self.oracle_error.square().sum(1) / 2

    def score(self, error: Float[Tensor, "B d"], **facts: Any) -> Record:
        """The record of a predictor with this error of its weights."""
        loss = error.square().sum(1) / 2
        adjusted = loss - self.oracle_loss
        if self.importance is not None:
            loss, adjusted = self.importance * loss, self.importance * adjusted
        count = len(adjusted)
        return {
            "noise": self.name,
            "sigma": None,
            "loss": _finite(loss.mean()),
            "adjusted_loss": _finite(adjusted.mean()),
            "standard_error": _finite(adjusted.std() / math.sqrt(count)),
            **facts,
        }

    def published_error(self, error: Float[Tensor, "B d"]) -> float | None:
        """Standard error of a published number: 100,000 sequences with one query each.

        With a, b the errors of the predictor and the oracle and a standard normal query x,
        E[((a·x)² - (b·x)²)²] = 3|a|⁴ + 3|b|⁴ - 2|a|²|b|² - 4(a·b)².
        """
        a, b = error.square().sum(1), self.oracle_error.square().sum(1)
        cross = (error * self.oracle_error).sum(1)
        fourth = (3 * a**2 + 3 * b**2 - 2 * a * b - 4 * cross**2).mean() / 4
        variance = fourth - ((a - b).mean() / 2) ** 2
        return _finite((variance.clamp_min(0) / PUBLISHED_SEQUENCES).sqrt())


def _finite(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def make_problems(
    noises: dict[str, Noise],
    *,
    dim: int,
    context: int,
    sequences: int,
    seed: int,
    device: torch.device | str,
) -> Iterator[Problem]:
    """One problem a noise distribution; they share features, weights and unit noise."""
    for name, noise in noises.items():
        task = NoisyRegression(dim=dim, context=context, noise=noise)
        g = Generator(device=device).manual_seed(seed)
        drawn = task.sample_gram(sequences, generator=g, dtype=torch.float64)
        yield Problem(name, noise, context, *drawn)


def expected_problem(
    name: str,
    noise: Noise,
    *,
    dim: int,
    context: int,
    sequences: int,
    seed: int,
    device: torch.device | str,
) -> Problem:
    """Spiked prompts with their importance: weighted means estimate expectations, tails and all.

    See `NoisyRegression.sample_spiked`.
    """
    task = NoisyRegression(dim=dim, context=context, noise=noise)
    parts = []
    for k in range(-(-sequences // STREAM)):
        g = Generator(device=device).manual_seed(seed + k)
        drawn, importance = task.sample_spiked(
            min(STREAM, sequences), [noise], [g], torch.float64, spikes=SPIKES, share=0.5
        )
        parts.append([*(tensor[0, 0] for tensor in drawn), importance[0]])
    return Problem(name, noise, context, *map(torch.cat, zip(*parts, strict=True)))


def typical(draws: list[list[Record]]) -> list[Record]:
    """Of the records of several draws, for each predictor that of the median draw.

    `draws` in the result holds the adjusted losses of all of them, from small to large.
    """
    found = []
    for records in zip(*draws, strict=True):
        ordered = sorted(records, key=adjusted_or_infinity)
        losses = [record["adjusted_loss"] for record in ordered]
        found.append(ordered[(len(ordered) - 1) // 2] | {"draws": losses})
    return found


def adjusted_or_infinity(record: Record) -> float:
    """A record's adjusted loss, by which records are ordered: infinite if there is none."""
    loss = record["adjusted_loss"]
    return math.inf if loss is None else float(loss)


def score_model(problem: Problem, run: Run, model: LinearTransformer) -> list[Record]:
    """Records of a model's prediction read after 0, 1, …, L layers."""
    weights = weights_after_layers(model, problem.gram)
    records = []
    for depth in range(run.layers + 1):
        error = weights[:, depth] - problem.weights
        facts: Record = {
            "model": run.kind,
            "layers": run.layers,
            "seed": run.seed,
            "read_after": depth,
        }
        if depth == run.layers:
            facts["published_standard_error"] = problem.published_error(error)
        records.append(problem.score(error, **facts))
    return records


@dataclass(frozen=True)
class Tuning:
    """Parameters of the tuned baselines for one noise distribution."""

    constant: float
    threshold: float
    factor: float


def tune(problem: Problem, sequences: int = 65536) -> Tuning:
    """Finds the baselines' parameters by minimising their loss."""
    gram, weights = problem.gram[:sequences], problem.weights[:sequences]
    return Tuning(tune_constant(gram, weights), *tune_ridge(gram, weights, problem.context))


def score_baselines(problem: Problem, tuning: Tuning, prior: Noise) -> list[Record]:
    """Records of the closed-form predictors; `prior` is the noise that Bayes assumes."""
    spectrum = problem.spectrum
    estimate = spectrum.residual_variance(problem.context)
    found = {
        "constrr": spectrum.ridge(tuning.constant),
        "adarr": spectrum.ridge(estimate),
        "tunedrr": spectrum.ridge(tuning.factor * estimate.clamp_max(tuning.threshold)),
        "bayes": bayes_coefficients(spectrum, problem.context, prior),
        "oracle": spectrum.ridge(problem.sigma**2),
    }
    records = []
    for name, coefficients in found.items():
        error = spectrum.rotate(coefficients - problem.truth)
        facts = {"model": name, "layers": None, "seed": None, "read_after": None}
        record = problem.score(error, **facts)
        record["published_standard_error"] = problem.published_error(error)
        records.append(record)
    return records


def profile(
    name: str,
    noise: Noise,
    sigmas: Iterable[float],
    models: dict[Run, LinearTransformer],
    tuning: Tuning,
    *,
    every_layer: bool,
    dim: int,
    context: int,
    sequences: int,
    seed: int,
    device: torch.device | str,
) -> Iterator[list[Record]]:
    """Per-variance profiles of models and baselines trained on `noise`: records for each sigma."""
    for sigma in sigmas:
        fixed: dict[str, Noise] = {name: Fixed(sigma)}
        (problem,) = make_problems(
            fixed, dim=dim, context=context, sequences=sequences, seed=seed, device=device
        )
        records = score_baselines(problem, tuning, noise)
        for run, model in models.items():
            scored = score_model(problem, run, model)
            records += scored if every_layer else scored[-1:]
        yield [record | {"sigma": sigma} for record in records]
