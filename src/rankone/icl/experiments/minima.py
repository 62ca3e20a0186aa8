"""GD++ with two layers has several minima, and training ends in the wrong one.

The loss of a GD++ model is a one-dimensional mean (`rankone.icl.gdpp`), and with two layers three
numbers decide: w_xx and w_yx of the first layer and w_yx of the second, in which the loss is a
parabola. So it can be looked at as a whole.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rankone.icl.gdpp import eigenvalue_nodes, population_loss

Record = dict[str, Any]
STARTS, STEPS = 64, 1500
_SAME = 0.01
"""Losses nearer than this share are one minimum."""


def best_last(
    w_xx: Float[Tensor, "*R"],
    w_yx: Float[Tensor, "*R"],
    values: Float[Tensor, " k"],
    variance: float,
) -> Float[Tensor, "*R"]:
    """The w_yx of the second layer with the least loss, for those of the first.

    The second layer adds -w m² (1 - v f) to f; the loss is quadratic in it.
    """  # fmt: skip
    m = 1 + w_xx[..., None] * values
    f = -w_yx[..., None] * torch.ones_like(values)
    push = m**2 * (1 - values * f)
    # ½ E[(v (f + t p) - 1)² + variance v (f + t p)²] is least at t:
    above = (push * values * (1 - values * f - variance * f)).mean(-1)
    below = (push**2 * values * (values + variance)).mean(-1)
    return -above / below


def landscape(
    values: Float[Tensor, " k"], variance: float, dim: int, *, points: int = 120
) -> tuple[Tensor, Tensor, Tensor]:
    """w_xx, w_yx and the least loss over the second layer's w_yx, [points] and [points, points]."""
    w_xx = -torch.linspace(0.0, 0.032, points, dtype=torch.float64)
    w_yx = -torch.linspace(0.0, 0.06, points, dtype=torch.float64)
    x, y = torch.meshgrid(w_xx, w_yx, indexing="ij")
    last = best_last(x, y, values, variance)
    first = torch.stack([x, torch.zeros_like(x)], dim=-1)
    return w_xx, w_yx, population_loss(first, torch.stack([y, last], -1), values, variance, dim)


def find_minima(*, dim: int = 10, context: int = 20, variance: float = 0.0) -> list[Record]:
    """The minima that descents from many starts end in, best first, and how many end in each.

    Starts that run away to huge weights are left out.
    """
    values = eigenvalue_nodes(dim, context)
    g = torch.Generator().manual_seed(0)
    # Starts of all sizes, as training with small and large weights has them.
    start = math.log(10) * (-3.0 + 2.0 * torch.rand(2, STARTS, generator=g, dtype=torch.float64))
    place = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([place], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    for _ in range(STEPS):
        optimiser.zero_grad()
        torch.log(_loss(place, values, variance, dim)).sum().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        loss = _loss(place, values, variance, dim)
        ridge_f = 1 / (values + variance)
        off = (ridge_f * values - 1) ** 2 + variance * values * ridge_f**2
        floor = float(dim * off.mean() / 2)
        w_xx, w_yx = -place.exp()
        last = best_last(w_xx, w_yx, values, variance)
    found: list[Record] = []
    for n in loss.argsort().tolist():
        value = float(loss[n])
        if float(w_xx[n]) < -1:  # has run away: a second layer that sees nothing
            continue
        if found and value - found[-1]["loss"] < _SAME * value:
            found[-1]["starts"] += 1
            continue
        numbers = (float(x[n]) for x in (w_xx, w_yx, last))
        found.append(
            dict(zip(("w_xx", "w_yx_first", "w_yx_last"), numbers, strict=True))
            | {
                "variance": variance,
                "loss": value,
                "above_constant_ridge": value - floor,
                "starts": 1,
            }
        )
    return found


def _loss(place: Tensor, values: Tensor, variance: float, dim: int) -> Tensor:
    w_xx, w_yx = -place.exp()
    last = best_last(w_xx, w_yx, values, variance)
    first = torch.stack([w_xx, torch.zeros_like(w_xx)], dim=-1)
    return population_loss(first, torch.stack([w_yx, last], dim=-1), values, variance, dim)
