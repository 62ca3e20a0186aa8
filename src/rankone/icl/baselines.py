"""Closed-form predictors: functions of a prompt's Gram matrix that return weights [B, d].

With gram = [[S, a], [aᵀ, c]], S = sum x xᵀ, a = sum y x, c = sum y²:

    ols             S⁻¹ a
    oracle_ridge    (S + sigma² I)⁻¹ a with the prompt's own sigma
    constant_ridge  the same with one variance for all prompts; best at E[sigma²]
    adaptive_ridge  variance estimated from the residual of least squares, rho / (n - d)
    tuned_ridge     that estimate, clipped at a threshold and multiplied by a factor
    bayes_ridge     posterior mean of w when sigma is unknown: no predictor has a smaller loss

All of them work in the eigenbasis of S and in float64; results come back in the Gram's type.
Vladymyrov et al. 2024, section 6; bayes_ridge is not in the paper.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rankone.tasks.noise import Noise


class Spectrum(NamedTuple):
    """A Gram matrix in the eigenbasis of its feature block."""

    values: Float[Tensor, "B d"]
    """Eigenvalues of S, ascending."""
    vectors: Float[Tensor, "B d d"]
    """Eigenvectors in the columns."""
    alpha: Float[Tensor, "B d"]
    """Vectorsᵀ a."""
    energy: Float[Tensor, " B"]
    """c = sum y²."""

    @classmethod
    def of(cls, gram: Float[Tensor, "B D D"], alike: Spectrum | None = None) -> Spectrum:
        """Decomposes a batch of Gram matrices; not again if they have the features of `alike`."""
        if gram.dim() != 3 or gram.shape[1] != gram.shape[2] or gram.shape[1] < 2:
            raise ValueError(f"gram must have shape [B, d+1, d+1], got {tuple(gram.shape)}")
        gram = gram.double()
        if not torch.isfinite(gram).all():
            raise ValueError("gram must be finite, got a NaN or an infinite entry")
        if alike is not None:
            values, vectors = alike.values, alike.vectors
        else:
            # cuSOLVER's batched solver fails on batches of 65,536 and more.
            parts = [torch.linalg.eigh(part) for part in torch.split(gram[:, :-1, :-1], 32768)]
            values = torch.cat([part.eigenvalues for part in parts]).clamp_min(0)
            vectors = torch.cat([part.eigenvectors for part in parts])
        alpha = (vectors.mT @ gram[:, :-1, -1:]).squeeze(-1)
        return cls(values, vectors, alpha, gram[:, -1, -1])

    def ridge(self, variance: Float[Tensor, " B"] | float) -> Float[Tensor, "B d"]:
        """Ridge weights in the eigenbasis; variance 0 gives the minimum-norm least squares."""
        shift = variance[:, None] if isinstance(variance, Tensor) else variance
        denominator = self.values + shift
        tiny = 1e-12 * self.values[:, -1:]
        return torch.where(denominator > tiny, self.alpha / denominator.clamp_min(tiny), 0.0)

    def rotate(self, coefficients: Float[Tensor, "B d"]) -> Float[Tensor, "B d"]:
        """From the eigenbasis to the features' own basis."""
        return (self.vectors @ coefficients[:, :, None]).squeeze(-1)

    def unrotate(self, weights: Float[Tensor, "B d"]) -> Float[Tensor, "B d"]:
        """From the features' own basis to the eigenbasis."""
        return (self.vectors.mT @ weights.double()[:, :, None]).squeeze(-1)

    def residual_variance(self, context: int) -> Float[Tensor, " B"]:
        """The unbiased estimate rho / (n - d) of the noise variance."""
        dim = self.values.shape[1]
        if context <= dim:
            raise ValueError(
                f"the noise estimate needs more examples than features, got context={context} "
                f"for {dim} features"
            )
        explained = (self.alpha * self.ridge(0.0)).sum(1)
        return ((self.energy - explained) / (context - dim)).clamp_min(0)


def ols(gram: Float[Tensor, "B D D"]) -> Float[Tensor, "B d"]:
    """Least squares (the one of minimum norm where it is not unique)."""
    return constant_ridge(gram, 0.0)


def oracle_ridge(gram: Float[Tensor, "B D D"], sigma: Float[Tensor, " B"]) -> Float[Tensor, "B d"]:
    """Ridge with each prompt's true noise: optimal when sigma is known."""
    spectrum = Spectrum.of(gram)
    if not isinstance(sigma, Tensor) or sigma.shape != gram.shape[:1]:
        got = tuple(sigma.shape) if isinstance(sigma, Tensor) else repr(sigma)
        raise ValueError(f"sigma must have shape [B] = ({len(gram)},), got {got}")
    if not (sigma >= 0).all():
        raise ValueError("sigma holds standard deviations, which must be >= 0")
    return spectrum.rotate(spectrum.ridge(sigma.double() ** 2)).to(gram.dtype)


def constant_ridge(gram: Float[Tensor, "B D D"], variance: float) -> Float[Tensor, "B d"]:
    """Ridge with one noise variance for all prompts (ConstRR)."""
    _check_nonnegative("variance", variance)
    spectrum = Spectrum.of(gram)
    return spectrum.rotate(spectrum.ridge(float(variance))).to(gram.dtype)


def adaptive_ridge(gram: Float[Tensor, "B D D"], context: int) -> Float[Tensor, "B d"]:
    """Ridge with the noise variance estimated from the prompt (AdaRR); needs n > d."""
    spectrum = Spectrum.of(gram)
    return spectrum.rotate(spectrum.ridge(spectrum.residual_variance(context))).to(gram.dtype)


def tuned_ridge(
    gram: Float[Tensor, "B D D"], context: int, threshold: float, factor: float
) -> Float[Tensor, "B d"]:
    """AdaRR with variance factor · min(estimate, threshold) (TunedRR)."""
    _check_nonnegative("threshold", threshold)
    _check_nonnegative("factor", factor)
    spectrum = Spectrum.of(gram)
    variance = factor * spectrum.residual_variance(context).clamp_max(threshold)
    return spectrum.rotate(spectrum.ridge(variance)).to(gram.dtype)


def bayes_ridge(
    gram: Float[Tensor, "B D D"], context: int, noise: Noise, *, nodes: int = 200
) -> Float[Tensor, "B d"]:
    """The posterior mean of w under w ~ N(0, I) and sigma ~ `noise`: the floor for every method.

    Mixes the ridge solutions of a quadrature rule over sigma by their posterior weights, from
    y | X, sigma ~ N(0, X Xᵀ + sigma² I).
    """
    spectrum = Spectrum.of(gram)
    return spectrum.rotate(bayes_coefficients(spectrum, context, noise, nodes)).to(gram.dtype)


def bayes_coefficients(
    spectrum: Spectrum, context: int, noise: Noise, nodes: int = 200
) -> Float[Tensor, "B d"]:
    """`bayes_ridge` in the eigenbasis, by a running log-sum-exp over the quadrature points."""
    if context < 1:
        raise ValueError(f"context must be at least 1, got {context}")
    if not isinstance(noise, Noise):
        raise ValueError(f"noise must be Uniform, Categorical or Fixed, got {noise!r}")
    points, weights = noise.quadrature(nodes)
    if len(points) == 1:
        return spectrum.ridge(float(points[0]) ** 2)
    values, alpha = spectrum.values, spectrum.alpha
    best = torch.full_like(spectrum.energy, -torch.inf)
    total = torch.zeros_like(best)
    mean = torch.zeros_like(alpha)
    # Below this variance the residual of a noise-free prompt is rounding error.
    smallest = 1e-10 * spectrum.energy / context
    points, log_weights = (t.to(values)[:, None] for t in (points, weights.log()))
    # On a GPU a launch costs more than the work of one point; on a CPU blocks leave the cache.
    at_once = 16 if values.is_cuda else 1
    blocks = (torch.split(t, at_once) for t in (points, log_weights))
    for sigma, prior in zip(*blocks, strict=True):
        variance = torch.maximum(sigma**2, smallest)  # [N, B]
        ridge = alpha / (values + variance[..., None])
        # log det(X Xᵀ + v I) = sum log(1 + value / v) + n log v
        log_det = torch.log1p(values / variance[..., None]).sum(2) + context * variance.log()
        quadratic = (spectrum.energy - (alpha * ridge).sum(2)).clamp_min(0) / variance
        log_weight = prior - (log_det + quadratic) / 2
        top = torch.maximum(best, log_weight.amax(0))
        keep, add = torch.exp(best - top), torch.exp(log_weight - top)
        total = keep * total + add.sum(0)
        mean = keep[:, None] * mean + (add[..., None] * ridge).sum(0)
        best = top
    return mean / total[:, None]


def tune_constant(gram: Float[Tensor, "B D D"], weights: Float[Tensor, "B d"]) -> float:
    """The variance with which `constant_ridge` has the smallest loss on these prompts."""
    spectrum = Spectrum.of(gram)
    truth = spectrum.unrotate(weights)

    def loss(variance: float) -> float:
        return float((spectrum.ridge(variance) - truth).square().sum(1).mean())

    largest = float(spectrum.energy.max())
    grid = [0.0, *(largest * 2.0**-k for k in range(40, -1, -1))]
    best = min(range(len(grid)), key=lambda k: loss(grid[k]))
    if best == 0:
        return 0.0
    return _golden_section(loss, grid[best - 1], grid[min(best + 1, len(grid) - 1)])


def tune_ridge(
    gram: Float[Tensor, "B D D"], weights: Float[Tensor, "B d"], context: int
) -> tuple[float, float]:
    """The (threshold, factor) with which `tuned_ridge` has the smallest loss on these prompts.

    A coarse grid over both, then golden sections along each in turn.
    """
    spectrum = Spectrum.of(gram)
    truth = spectrum.unrotate(weights)
    estimate = spectrum.residual_variance(context)

    def loss(threshold: float, factor: float) -> float:
        variance = factor * estimate.clamp_max(threshold)
        return float((spectrum.ridge(variance) - truth).square().sum(1).mean())

    largest = float(estimate.max())
    if largest < 1e-9:  # noise-free prompts: every choice is least squares
        return 0.0, 1.0
    thresholds = [largest * 2.0 ** (-k / 2) for k in range(16)]
    factors = [1.2**k for k in range(-4, 8)]
    threshold, factor = min(
        ((t, f) for t in thresholds for f in factors), key=lambda pair: loss(*pair)
    )
    width = 1.5
    for _ in range(8):
        along = partial(loss, factor=factor)
        threshold = _golden_section(along, threshold / width, threshold * width)
        across = partial(loss, threshold)
        factor = _golden_section(across, factor / width, factor * width)
        width = 1 + (width - 1) * 0.7
    return threshold, factor


def _golden_section(function: Callable[[float], float], low: float, high: float) -> float:
    """The minimum of a unimodal function to 1e-4 of the interval."""
    ratio = (5**0.5 - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(20):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2


def _check_nonnegative(name: str, value: float) -> None:
    if not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"{name} must be a number >= 0, got {value}")
