"""Trained models on prompts unlike those of training: how they carry over.

One thing changes at a time: the number of examples, the noise, the covariance of the features, or
the weight of their tails. Weights stay standard normal and labels linear, so that ridge regression
with the true noise stays the best there is, and losses are told above its loss.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from rankone.icl.baselines import adaptive_ridge, bayes_ridge, constant_ridge, oracle_ridge
from rankone.icl.chosen import Chosen
from rankone.tasks.noise import Fixed, Noise, noise_from_name
from rankone.tasks.regression import NoisyRegression

Record = dict[str, Any]
PROMPTS = 20_000

AXES: dict[str, tuple[str, tuple[float, ...]]] = {
    "context": ("examples n", (5, 10, 15, 20, 30, 40, 60, 100)),
    "noise": ("noise σ, alone", (0, 1, 2, 3, 4, 5, 6, 8, 10)),
    "condition": ("condition number of the covariance", (1, 2, 4, 8, 16, 32)),
    "tails": ("degrees of freedom of the features", (2.5, 3, 4, 6, 10, 30)),
}
"""What changes, as it is told, and to what."""


class Prompts(NamedTuple):
    """Gram matrices, and what is known of them."""

    gram: Float[Tensor, "B D D"]
    weights: Float[Tensor, "B d"]
    sigma: Float[Tensor, " B"]
    covariance: Float[Tensor, "d d"]
    """Of the query's features."""
    context: int


def draw(axis: str, value: float, *, dim: int, context: int, noise: Noise) -> Prompts:
    """Prompts in which one thing is as `value` says and all else as in training."""
    g, eye = torch.Generator().manual_seed(0), torch.eye(dim, dtype=torch.float64)
    covariance = eye
    if axis == "context":
        context = int(value)
    elif axis == "noise":
        noise = Fixed(float(value))
    elif axis == "condition":
        values = torch.logspace(0, -math.log10(value), dim, dtype=torch.float64)
        covariance = torch.diag(values * dim / values.sum())
    elif axis == "tails":
        return _heavy(value, dim, context, noise, g)
    else:
        raise ValueError(f"axis must be one of {', '.join(AXES)}, got {axis!r}")
    task = NoisyRegression(dim=dim, context=context, noise=noise, covariance=covariance)
    drawn = task.sample_gram(PROMPTS, generator=g, dtype=torch.float64)
    return Prompts(drawn.gram, drawn.weights, drawn.sigma, covariance, context)


def _heavy(freedom: float, dim: int, context: int, noise: Noise, g: Generator) -> Prompts:
    """Features with Student's distribution, of variance 1: x = z √((nu - 2) / chi²_nu)."""
    task = NoisyRegression(dim=dim, context=context, noise=noise)
    drawn = task.sample(PROMPTS, generator=g, dtype=torch.float64)
    x, y = drawn.tokens[:, :-1, :-1], drawn.tokens[:, :-1, -1]
    unexplained = y - (x @ drawn.weights[:, :, None])[:, :, 0]
    torch_state = torch.random.get_rng_state()
    torch.manual_seed(1)
    chi = torch.distributions.Chi2(freedom).sample((PROMPTS, context, 1)).double()
    torch.random.set_rng_state(torch_state)
    x = x * ((freedom - 2) / chi).sqrt()
    y = (x @ drawn.weights[:, :, None])[:, :, 0] + unexplained
    tokens = torch.cat([x, y[:, :, None]], dim=2)
    gram = tokens.mT @ tokens
    eye = torch.eye(dim, dtype=torch.float64)
    return Prompts(gram, drawn.weights, drawn.sigma, eye, context)


def transfer(found: Chosen, *, noise: str = "sigma_5") -> list[Record]:
    """Mean and median of the adjusted loss of the deepest model of every kind, and of ridges.

    A model whose mean is not finite has exploded on some prompt; its mean is None.
    """
    trained, records = noise_from_name(noise), []
    models = deepest(found, noise)
    for axis, (_, values) in AXES.items():
        for value in values:
            prompts = draw(axis, value, dim=found.dim, context=found.context, noise=trained)
            best = oracle_ridge(prompts.gram, prompts.sigma)
            floor = _losses(best, prompts)
            predictors = {
                name: model.implicit_weights(prompts.gram) for name, model in models.items()
            }
            predictors["constrr"] = constant_ridge(prompts.gram, trained.mean_square)
            predictors["bayes"] = bayes_ridge(prompts.gram, prompts.context, trained)
            if prompts.context > found.dim:
                predictors["adarr"] = adaptive_ridge(prompts.gram, prompts.context)
            for name, weights in predictors.items():
                excess = _losses(weights.detach(), prompts) - floor
                mean, error = float(excess.mean()), float(excess.std()) / math.sqrt(len(excess))
                records.append(
                    {
                        "axis": axis,
                        "value": value,
                        "model": name,
                        "adjusted_loss": mean if math.isfinite(mean) else None,
                        "standard_error": error if math.isfinite(error) else None,
                        "median": float(excess.nan_to_num(math.inf).median()),
                    }
                )
    return records


def deepest(found: Chosen, noise: str) -> dict[str, Any]:
    """The deepest model of each kind that was trained on a noise, in float64."""
    models: dict[str, Any] = {}
    for run in sorted(found.models, key=lambda run: run.layers):
        if run.noise == noise:
            models[run.kind] = found.models[run].double()
    if not models:
        noises = ", ".join(sorted({run.noise for run in found.models}))
        raise ValueError(f"noise must be one that was trained on, {noises}; got {noise}")
    return models


def _losses(weights: Tensor, prompts: Prompts) -> Tensor:
    """½ (w - w*)ᵀ C (w - w*) of every prompt: over queries."""
    off = weights - prompts.weights
    return torch.einsum("bi,ij,bj->b", off, prompts.covariance, off) / 2
