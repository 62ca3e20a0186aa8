"""Minimisation of many functions side by side: BFGS, a row a function (Nocedal and Wright 2006).

All functions are evaluated in one call. The rows do not feel each other: each has its own inverse
Hessian, step length and end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Function = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Parameters [R, p] → values [R] and gradients [R, p]."""

TRIALS = 12
"""Step lengths that are tried before a row is at its end."""
SUFFICIENT = 1e-4
"""A step is taken if it gains this share of what the slope promises (Armijo 1966)."""
SHORTER = 0.3
"""The next step length that is tried, as a multiple of the last."""
PATIENCE = 3
"""A row ends after so many steps in succession that gain less than the tolerance."""


class State(NamedTuple):
    """Where a minimisation is; it can go on from there with another function."""

    x: Float[Tensor, "R p"]
    value: Float[Tensor, " R"]
    hessian: Float[Tensor, "R p p"] | None
    """The inverse Hessian as far as it is known."""


def minimise(
    function: Function,
    x: Float[Tensor, "R p"],
    *,
    iterations: int,
    longest: float = 1.0,
    first: float = 0.1,
    tolerance: float = 1e-8,
    hessian: Float[Tensor, "R p p"] | None = None,
    observe: Callable[[int, Tensor], None] = lambda iteration, x: None,
) -> State:
    """Minimises every row's function from `x`; steps have at most the length `longest`.

    The first step has the length `first`, unless an inverse Hessian is given. `observe` is called
    with 0 and `x`, and after each iteration.
    """
    value, grad = function(x)
    rows, size = x.shape
    unit = torch.eye(size, dtype=x.dtype)
    known = torch.full((rows,), hessian is not None)
    if hessian is None:
        hessian = unit * (first / grad.norm(dim=1).clamp_min(1e-300))[:, None, None]
    idle = torch.zeros(rows, dtype=torch.long)
    observe(0, x)
    for iteration in range(1, iterations + 1):
        done = idle >= PATIENCE
        if bool(done.all()):
            break
        taken, new_x, new_value, new_grad = _search(
            function, x, value, grad, _direction(hessian, grad, longest), done
        )
        step, change = new_x - x, new_grad - grad
        curved = (step * change).sum(1) > 1e-10 * step.norm(dim=1) * change.norm(dim=1)
        fresh = (curved & ~known)[:, None, None]
        scale = (step * change).sum(1) / change.square().sum(1).clamp_min(1e-300)
        hessian = torch.where(fresh, scale[:, None, None] * unit, hessian)
        hessian = _update(hessian, step, change, curved)
        known |= curved
        slow = value - new_value < tolerance
        idle = torch.where(done | ~taken, PATIENCE, torch.where(slow, idle + 1, 0))
        x, value, grad = new_x, new_value, new_grad
        observe(iteration, x)
    return State(x, value, hessian)


def _direction(
    hessian: Float[Tensor, "R p p"], grad: Float[Tensor, "R p"], longest: float
) -> Float[Tensor, "R p"]:
    step = -(hessian @ grad[:, :, None]).squeeze(2)
    uphill = (step * grad).sum(1, keepdim=True) >= 0  # rounding only: the matrix is positive
    step = torch.where(uphill, -grad, step)
    longer: Tensor = step.norm(dim=1, keepdim=True).clamp_min(longest)
    return step * (longest / longer)


def _search(
    function: Function,
    x: Float[Tensor, "R p"],
    value: Float[Tensor, " R"],
    grad: Float[Tensor, "R p"],
    step: Float[Tensor, "R p"],
    done: Bool[Tensor, " R"],
) -> tuple[Bool[Tensor, " R"], Tensor, Tensor, Tensor]:
    """Backtracking: which rows took a step, and where every row is then."""
    slope = (step * grad).sum(1)
    length = torch.ones_like(value)
    taken = torch.zeros_like(done)
    best_x, best_value, best_grad = x, value, grad
    for _ in range(TRIALS):
        waiting = ~(taken | done)
        trial = torch.where(waiting[:, None], x + length[:, None] * step, best_x)
        trial_value, trial_grad = function(trial)
        good = waiting & (trial_value <= value + SUFFICIENT * length * slope)
        good &= trial_grad.isfinite().all(1)
        best_x = torch.where(good[:, None], trial, best_x)
        best_grad = torch.where(good[:, None], trial_grad, best_grad)
        best_value = torch.where(good, trial_value, best_value)
        taken |= good
        if bool((taken | done).all()):
            break
        length = length * SHORTER
    return taken, best_x, best_value, best_grad


def _update(
    hessian: Float[Tensor, "R p p"],
    step: Float[Tensor, "R p"],
    change: Float[Tensor, "R p"],
    curved: Bool[Tensor, " R"],
) -> Float[Tensor, "R p p"]:
    """The BFGS formula for the inverse Hessian, in rows whose gradient changed along the step."""
    product = (step * change).sum(1)
    weight = torch.where(curved, 1 / product, 0.0)
    turned = (hessian @ change[:, :, None]).squeeze(2)
    outer = step[:, :, None] * turned[:, None, :]
    own = (1 + weight * (change * turned).sum(1)) * weight
    squares = own[:, None, None] * step[:, :, None] * step[:, None, :]
    return hessian + squares - weight[:, None, None] * (outer + outer.mT)


__all__ = ["Function", "State", "minimise"]
