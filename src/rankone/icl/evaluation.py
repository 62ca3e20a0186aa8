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
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

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
T = TypeVar("T")

PUBLISHED_SEQUENCES = 100_000
"""Sequences, with one query each, behind every number of the published table."""

SPIKES = (1.5, 2.0, 2.5, 3.0)
STREAM = 2048
"""Spiked prompts that are weighted together; the cost of the weights is quadratic in it."""


AT_ONCE = {"cpu": 2**25, "cuda": 2**29}
"""Numbers that the read-out of a group of models may hold."""


def weights_after_layers(
    models: Sequence[LinearTransformer], gram: Float[Tensor, "B D D"]
) -> Float[Tensor, "R B L1 d"]:
    """Implicit weights of models of one depth after 0, 1, …, L layers, by the fastest way here."""
    impl, _ = choose("auto", gram.device, models[0].dim)
    with torch.no_grad():
        if impl == "reference":
            return torch.stack([_plain_weights(model, gram) for model in models])
        if impl == "fused_cpu":
            from rankone.icl.gradients.fused_cpu import weights_after_layers as fused
        else:
            from rankone.icl.gradients.read_gpu import weights_after_layers as fused
        matrices = zip(*(model.matrices() for model in models), strict=True)
        P, Q = (torch.stack(parts).to(gram) for parts in matrices)
        stream = torch.zeros(len(models), dtype=torch.long, device=gram.device)
        return fused(P, Q, gram[None], stream)


def _plain_weights(
    model: LinearTransformer, gram: Float[Tensor, "B D D"]
) -> Float[Tensor, "B L1 d"]:
    model = deepcopy(model).to(gram)  # the caller's stays where it is
    parts = [model.implicit_weights(part, every_layer=True) for part in torch.split(gram, 32768)]
    return torch.cat(parts)


def _groups(
    models: dict[Run, LinearTransformer], batch: int, device: torch.device
) -> Iterator[list[Run]]:
    """The runs of equal shapes, as many at a time as fit into memory."""
    shapes: dict[tuple[int, ...], list[Run]] = {}
    for run, model in models.items():
        shapes.setdefault((model.layers, model.heads, model.dim), []).append(run)
    for (layers, _, dim), runs in shapes.items():
        size = max(1, AT_ONCE.get(device.type, AT_ONCE["cpu"]) // (batch * (layers + 1) * dim))
        for first in range(0, len(runs), size):
            yield runs[first : first + size]


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
    alike: Spectrum | None = None
    """The spectrum of prompts with the same features, if it is known."""

    @cached_property
    def spectrum(self) -> Spectrum:
        """The Gram matrices' eigenbasis."""
        return Spectrum.of(self.gram, self.alike)

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

    def score(self, errors: Float[Tensor, "R B K d"]) -> list[list[Record]]:
        """For each of R sets the records of K predictors with these errors of their weights."""
        loss = errors.square().sum(3) / 2
        adjusted = loss - self.oracle_loss[:, None]
        if self.importance is not None:
            loss, adjusted = (self.importance[:, None] * part for part in (loss, adjusted))
        error = adjusted.std(1) / math.sqrt(adjusted.shape[1])
        numbers = torch.stack([loss.mean(1), adjusted.mean(1), error], dim=2).tolist()
        return [
            [
                {
                    "noise": self.name,
                    "sigma": None,
                    "loss": _finite(mean),
                    "adjusted_loss": _finite(difference),
                    "standard_error": _finite(spread),
                }
                for mean, difference, spread in row
            ]
            for row in numbers
        ]

    def published_errors(self, error: Float[Tensor, "R B d"]) -> list[float | None]:
        """Standard errors of published numbers: 100,000 sequences with one query each.

        With a, b the errors of the predictor and the oracle and a standard normal query x,
        E[((a·x)² - (b·x)²)²] = 3|a|⁴ + 3|b|⁴ - 2|a|²|b|² - 4(a·b)².
        """
        a, b = error.square().sum(2), self.oracle_error.square().sum(1)
        cross = (error * self.oracle_error).sum(2)
        fourth = (3 * a**2 + 3 * b**2 - 2 * a * b - 4 * cross**2).mean(1) / 4
        variance = fourth - ((a - b).mean(1) / 2) ** 2
        return [_finite(e) for e in (variance.clamp_min(0) / PUBLISHED_SEQUENCES).sqrt().tolist()]


def _finite(number: float) -> float | None:
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
    alike: Spectrum | None = None
    for name, noise in noises.items():
        task = NoisyRegression(dim=dim, context=context, noise=noise)
        g = Generator(device=device).manual_seed(seed)
        drawn = task.sample_gram(sequences, generator=g, dtype=torch.float64)
        problem = Problem(name, noise, context, *drawn, alike=alike)
        yield problem
        alike = problem.spectrum


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
    gram, weights, sigma, importance = map(torch.cat, zip(*parts, strict=True))
    return Problem(name, noise, context, gram, weights, sigma, importance)


def typical(draws: list[list[Record]]) -> list[Record]:
    """Of the records of several draws, for each predictor that of the median draw.

    `draws` in the result holds the adjusted losses of all of them, from small to large.
    `relative_error` is the standard error over the loss; it and `published_standard_error` are
    medians over the draws too, since one exploding prompt makes both large.
    """
    found = []
    for records in zip(*draws, strict=True):
        ordered = sorted(records, key=adjusted_or_infinity)
        entry = _middle(ordered) | {
            "draws": [record["adjusted_loss"] for record in ordered],
            "relative_error": _median(map(_relative_error, records)),
        }
        if "published_standard_error" in entry:
            errors = (record["published_standard_error"] for record in records)
            entry["published_standard_error"] = _median(errors)
        found.append(entry)
    return found


def _relative_error(record: Record) -> float | None:
    loss, error = record["adjusted_loss"], record["standard_error"]
    return error / abs(loss) if loss and error is not None else None


def _median(values: Iterable[float | None]) -> float | None:
    """The lower median; None counts as infinite."""
    return _finite(_middle(sorted(math.inf if value is None else value for value in values)))


def _middle(ordered: list[T]) -> T:
    return ordered[(len(ordered) - 1) // 2]


def adjusted_or_infinity(record: Record) -> float:
    """A record's adjusted loss, by which records are ordered: infinite if there is none."""
    loss = record["adjusted_loss"]
    return math.inf if loss is None else float(loss)


def score_models(problem: Problem, models: dict[Run, LinearTransformer]) -> list[Record]:
    """Records of every model's prediction read after 0, 1, …, L layers, model by model."""
    found: dict[Run, list[Record]] = {}
    for runs in _groups(models, len(problem.gram), problem.gram.device):
        errors = weights_after_layers([models[run] for run in runs], problem.gram)
        errors -= problem.weights[:, None]
        published = problem.published_errors(errors[:, :, -1])
        for run, records, error in zip(runs, problem.score(errors), published, strict=True):
            for depth, record in enumerate(records):
                facts = {"model": run.kind, "layers": run.layers, "seed": run.seed}
                record |= facts | {"read_after": depth}
            records[-1]["published_standard_error"] = error
            found[run] = records
    return [record for run in models for record in found[run]]


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
    facts: Record = {"layers": None, "seed": None, "read_after": None}
    errors = torch.stack(
        [spectrum.rotate(coefficients - problem.truth) for coefficients in found.values()]
    )
    scored = zip(
        found, problem.score(errors[:, :, None]), problem.published_errors(errors), strict=True
    )
    return [
        record | {"model": name, **facts, "published_standard_error": error}
        for name, (record,), error in scored
    ]


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
    fixed: dict[str, Noise] = {str(sigma): Fixed(sigma) for sigma in sigmas}
    for problem in make_problems(
        fixed, dim=dim, context=context, sequences=sequences, seed=seed, device=device
    ):
        records = score_baselines(problem, tuning, noise)
        scored = score_models(problem, models)
        records += [r for r in scored if every_layer or r["read_after"] == r["layers"]]
        yield [record | {"noise": name, "sigma": float(problem.name)} for record in records]
