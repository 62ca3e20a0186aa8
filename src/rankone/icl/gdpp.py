"""GD++ exactly: it acts on eigenvalues, so its population loss is a one-dimensional mean.

In the eigenbasis of S = sum x xᵀ a GD++ model multiplies a = sum y x by a polynomial f of S,
    m ← m (1 + w_xx m² value),   f ← f - w_yx m² (1 - value f),     m = 1, f = 0 at first,
and averaged over w ~ N(0, I) and the noise its loss is
    ½ E sum_i (f(value_i) value_i - 1)² + E[sigma²] value_i f(value_i)².
The best f of all is 1 / (value + E[sigma²]): GD++ of any depth loses to constant ridge or ties.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from rankone.tasks.regression import bartlett


def eigenvalue_nodes(
    dim: int, context: int, *, count: int = 1000, samples: int = 40_000, seed: int = 0
) -> Float[Tensor, " count"]:
    """Equal-weight points that stand for the eigenvalues of S (isotropic features)."""
    g = Generator().manual_seed(seed)
    factor = bartlett(samples, dim, context, generator=g, dtype=torch.float64)
    values: Tensor = torch.linalg.eigvalsh(factor @ factor.mT).flatten().sort().values
    return values[: values.numel() // count * count].view(count, -1).mean(1)


def population_loss(
    w_xx: Float[Tensor, "*R L"],
    w_yx: Float[Tensor, "*R L"],
    values: Float[Tensor, " k"],
    variance: float,
    dim: int,
) -> Float[Tensor, "*R"]:
    """Loss of GD++ models, `variance` = E[sigma²], `values` equal-weight eigenvalues."""
    m, f = torch.ones_like(values), torch.zeros_like(values)
    for a, b in zip(w_xx.unbind(-1), w_yx.unbind(-1), strict=True):
        m, f = (
            m * (1 + a[..., None] * m**2 * values),
            f - b[..., None] * m**2 * (1 - values * f),
        )
    return dim * ((f * values - 1) ** 2 + variance * values * f**2).mean(-1) / 2


def gap_to_constant_ridge(
    layers: int, *, dim: int, context: int, variance: float, starts: int = 48, steps: int = 300
) -> float:
    """How far above constant ridge the best GD++ model of a depth stays: best of many starts.

    All starts descend on a few points; the best of them go on with all points.
    """
    values = eigenvalue_nodes(dim, context)
    g = Generator().manual_seed(1)
    noise = torch.rand(2, starts, layers, generator=g, dtype=torch.float64)
    # omegas from -0.003 to -0.3
    log, loss = _descend(
        math.log(10) * (-2.5 + 2 * noise), values.view(100, -1).mean(1), variance, dim, steps
    )
    best = loss.topk(min(4, starts), largest=False).indices
    _, loss = _descend(log[:, best], values, variance, dim, steps)
    f = 1 / (values + variance)
    ridge = dim * ((f * values - 1) ** 2 + variance * values * f**2).mean() / 2
    return float(loss.min() - ridge)


def _descend(
    log: Float[Tensor, "2 R L"], values: Float[Tensor, " k"], variance: float, dim: int, steps: int
) -> tuple[Float[Tensor, "2 R L"], Float[Tensor, " R"]]:
    """Adam on the logarithms of -w_xx and -w_yx; where it ends, and the losses there."""
    log = log.clone().requires_grad_()
    optimiser = torch.optim.Adam([log], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = population_loss(-log[0].exp(), -log[1].exp(), values, variance, dim)
        torch.asinh(loss / dim).sum().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    log = log.detach()
    loss = population_loss(-log[0].exp(), -log[1].exp(), values, variance, dim)
    return log, torch.where(torch.isfinite(loss), loss, math.inf)
