"""What a trained model does, layer by layer, in the terms of the theory.

A layer takes the implicit weights w one step on, and a step has a size, a direction, a memory and a
rescaling. They are measured on prompts of one noise level, so that models can be compared with what
the closed forms would do at that level.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rankone.icl.baselines import Spectrum
from rankone.icl.model import LinearTransformer
from rankone.icl.theory.implicit import ImplicitModel, implicit_models
from rankone.tasks.regression import Grams

_SMALLEST, _LARGEST, _NODES = 1e-3, 1e3, 361
"""Ridge variances that weights are compared with, and how many; 60 a decade."""


class Layer(NamedTuple):
    """What stands behind one layer, and what its step was; layer 0 is before the first one."""

    layer: int
    adjusted_loss: float
    """Loss of the weights so far above that of ridge regression that knows the noise."""
    step: float | None
    """Size of the step along the downward gradient g of half the sum of squares, times n: the best
    multiple of g for the change of w, over all prompts. The first step of least squares would
    be 1."""
    alignment: float | None
    """Cosine of the change of w and g: 1 is plain gradient descent."""
    precondition_low: float
    """Median of the least singular value of M: what features have been multiplied by."""
    precondition_high: float
    """Median of the largest one."""
    momentum: float
    """Length of u, what labels have written into features, times √n: the memory of past steps."""
    rescaling: float | None
    """Mean of 1 + d, by which weights and labels were multiplied (1 + w_yy lambda for DIAG)."""
    label: float
    """Mean of a, how much of its label a token still has."""
    ridge_variance: float | None
    """Median over prompts of the ridge variance whose weights are nearest to these: what noise the
    model behaves as if there were. None for weights that are nearest to 0."""
    ridge_distance: float
    """How far those nearest weights are, relative, in the median: 0 if the weights are a ridge
    solution."""


def probe(
    model: LinearTransformer, prompts: Grams, *, context: int, chunk: int = 4096
) -> list[Layer]:
    """The layers of a model on prompts of one noise level.

    >>> from rankone.icl import NoisyRegression, Fixed
    >>> from rankone.icl.theory import gradient_descent
    >>> task = NoisyRegression(dim=3, context=30, noise=Fixed(0.5))
    >>> grams = task.sample_gram(2000, generator=0, dtype=torch.float64)
    >>> found = probe(gradient_descent([1 / 60, 1 / 60], dim=3), grams, context=30)
    >>> [None if layer.step is None else round(layer.step, 6) for layer in found]
    [None, 0.5, 0.5]

    Raises ValueError for prompts without an example and for models of other sizes.
    """
    if context < 1:
        raise ValueError(f"context must be at least 1, got {context}")
    gram = prompts.gram.to(torch.float64)
    wide = LinearTransformer.from_parameters(
        model.kind, model.p.detach().double(), model.q.detach().double(), model.dim
    )
    with torch.no_grad():
        parts = [implicit_models(wide, part) for part in torch.split(gram, chunk)]
        found = type(parts[0])(*(torch.cat(x) for x in zip(*parts, strict=True)))
        d = model.dim
        sums, moment = gram[:, :d, :d], gram[:, :d, d]
        spectrum = Spectrum.of(gram)
        truth, sigma = prompts.weights.double(), prompts.sigma.double()
        oracle = spectrum.rotate(spectrum.ridge(sigma**2))
        floor = (oracle - truth).square().sum(1).mean() / 2
        layers = []
        for n in range(model.layers + 1):
            M, u, a, w = (part[:, n] for part in found)
            step = alignment = rescaling = None
            if n:
                before = found.w[:, n - 1]
                g = moment - (sums @ before[:, :, None])[:, :, 0]
                step, alignment = _along(w - before, g, context)
                rescaling = float(_rescaling(wide, found, gram, n - 1).mean())
            values = torch.linalg.svdvals(M)
            variance, distance = nearest_ridge(spectrum, w)
            layers.append(
                Layer(
                    n,
                    float((w - truth).square().sum(1).mean() / 2 - floor),
                    step,
                    alignment,
                    float(values[:, -1].median()),
                    float(values[:, 0].median()),
                    float(u.square().sum(1).mean().sqrt()) * math.sqrt(context),
                    rescaling,
                    float(a.mean()),
                    None if torch.isinf(variance.median()) else float(variance.median()),
                    float(distance.median()),
                )
            )
    return layers


def nearest_ridge(
    spectrum: Spectrum, weights: Float[Tensor, "B d"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """The variance whose ridge weights are nearest to the given ones, and their relative distance.

    Variances are looked for between 10⁻³ and 10³, 60 a decade; 0 and infinity stand for both ends.
    """
    given = spectrum.unrotate(weights)
    grid = torch.logspace(math.log10(_SMALLEST), math.log10(_LARGEST), _NODES, dtype=torch.float64)
    best = torch.full_like(given[:, 0], torch.inf)
    at = torch.zeros_like(best)
    for variance in (0.0, *grid.tolist(), math.inf):
        ridge = spectrum.ridge(variance) if variance < math.inf else torch.zeros_like(given)
        distance = (ridge - given).norm(dim=1)
        at = torch.where(distance < best, variance, at)
        best = torch.minimum(distance, best)
    return at, best / given.norm(dim=1).clamp_min(1e-300)


def _along(change: Tensor, g: Tensor, context: int) -> tuple[float, float]:
    """The best multiple of g for the change, times n, and the mean cosine of both."""
    inner = (change * g).sum(1)
    lengths = (change.norm(dim=1) * g.norm(dim=1)).clamp_min(1e-300)
    return float(inner.sum() / g.square().sum()) * context, float((inner / lengths).mean())


def _rescaling(model: LinearTransformer, found: ImplicitModel, gram: Tensor, layer: int) -> Tensor:
    """1 + d of a layer, d the last entry of Σ_h P_h G Q_h."""
    M, u, a, w = (part[:, layer] for part in found)
    above = torch.cat([M, u[:, :, None]], dim=2)
    below = torch.cat([-w, a[:, None]], dim=1)[:, None]
    transform = torch.cat([above, below], dim=1)
    tokens = transform @ gram @ transform.mT
    P, Q = (x[layer] for x in model.matrices())
    return 1 + torch.einsum("hi,bij,hj->b", P[:, -1], tokens, Q[:, :, -1])
