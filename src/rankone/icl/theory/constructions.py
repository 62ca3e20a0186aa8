"""Weights that are known to compute something, as models.

Nothing is divided by the number of examples here: a step size of eta on 1/n sum is eta / n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from rankone.icl.model import LinearTransformer


def gradient_descent(steps: Sequence[float], *, dim: int) -> LinearTransformer:
    """A GD++ model whose layers are steps of plain gradient descent, in float64.

    Layer l makes w ← w + eta_l sum_i (y_i - <w, x_i>) x_i, a step on half the sum of squares, from
    w = 0: w_yx = -eta_l, all else 0.

    >>> model = gradient_descent([0.1], dim=2)
    >>> gram = torch.tensor([[[1.0, 0.0, 3.0], [0.0, 1.0, 5.0], [3.0, 5.0, 34.0]]]).double()
    >>> model.implicit_weights(gram).detach()
    tensor([[0.3000, 0.5000]], dtype=torch.float64)

    Von Oswald et al. 2023, proposition 1; Vladymyrov et al. 2024, section 3.
    """
    eta = _positive_steps("steps", steps)
    zeros = torch.zeros_like(eta)
    p, q = torch.stack([zeros, -eta], dim=1), torch.ones_like(eta)[:, None]
    return LinearTransformer.from_parameters("gd++", p[:, None], q[:, None], dim)


def preconditioned_descent(
    preconditioners: Float[Tensor, "L d d"], *, context: int
) -> LinearTransformer:
    """A FULL model with w ← w - A_l grad R(w), R(w) = sum_i (<w, x_i> - y_i)² / (2 n).

    P = [0 0; 0 1] and Q = -[A_l / n 0; 0 0] (Ahn et al. 2023, lemma 1). A_l need not be symmetric.
    """
    if preconditioners.dim() != 3 or preconditioners.shape[1] != preconditioners.shape[2]:
        raise ValueError(
            f"preconditioners must have shape [L, d, d], got {tuple(preconditioners.shape)}"
        )
    if context < 1:
        raise ValueError(f"context must be at least 1, got {context}")
    L, d, _ = preconditioners.shape
    P = preconditioners.new_zeros(L, 1, d + 1, d + 1)
    P[:, :, d, d] = 1.0
    # A token's own features meet Q from the right: the step of w is the transpose's.
    Q = torch.zeros_like(P)
    Q[:, 0, :d, :d] = -preconditioners.mT / context
    return LinearTransformer.from_matrices(P, Q)


def best_single_layer(
    covariance: Float[Tensor, "d d"], *, context: int, variance: float = 0.0
) -> LinearTransformer:
    """The single layer with the least expected loss, for features N(0, C) and weights N(0, I).

    One step of preconditioned descent with A = n ((n + 1) C + (tr C + E[sigma²]) I)⁻¹: with
    E[S] = n C and E[S²] = n (n + 1) C² + n tr(C) C for S = sum x xᵀ it solves
    E[w alphaᵀ] = A/n E[alpha alphaᵀ].

    Args:
        covariance: C.
        context: n.
        variance: E[sigma²] of the labels' noise.

    Ahn et al. 2023, theorem 1, there without noise.
    """
    if covariance.dim() != 2 or covariance.shape[0] != covariance.shape[1]:
        raise ValueError(f"covariance must have shape [d, d], got {tuple(covariance.shape)}")
    if context < 1 or variance < 0:
        raise ValueError(
            f"context must be at least 1 and variance not negative, got {context} and {variance}"
        )
    if float(torch.linalg.eigvalsh(covariance).min()) <= 0:
        raise ValueError("covariance must be positive definite")
    eye = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    ridge = (torch.trace(covariance) + variance) * eye
    A = context * torch.linalg.inv((context + 1) * covariance + ridge)
    return preconditioned_descent(A[None], context=context)


def least_squares_schedule(
    low: float, high: float, accuracy: float, *, dim: int
) -> LinearTransformer:
    """A GD++ model that solves least squares on any prompt whose sum x xᵀ has its eigenvalues
    between `low` and `high`.

    Its weights are within accuracy · ‖w*‖ of the solution w* of a prompt without noise. Layers of
    the first kind bring the eigenvalues together, S ← (I - g S) S (I - g S) with g = 1 / (3 nu) for
    the largest eigenvalue nu so far: v ← v (1 - g v)² is increasing up to nu. The last layer is a
    step of gradient descent of size 1 / mu for the smallest one.

    The number of layers grows as log(high / low) + log log(1 / accuracy): see `schedule_length`.

    Vladymyrov et al. 2024, theorem 5.1.
    """
    rates, last = _schedule(low, high, accuracy)
    rows = [[-rate, 0.0] for rate in rates] + [[0.0, -1 / last]]
    p = torch.tensor(rows, dtype=torch.float64)[:, None]
    return LinearTransformer.from_parameters("gd++", p, torch.ones_like(p[..., :1]), dim)


def schedule_length(condition: float, accuracy: float) -> int:
    """Layers of `least_squares_schedule` for a condition number.

    >>> [schedule_length(k, 1e-6) for k in (10, 100, 1000, 10_000)]
    [8, 11, 14, 16]
    >>> [schedule_length(10, e) for e in (1e-2, 1e-4, 1e-8, 1e-15)]
    [6, 7, 8, 9]
    """
    return len(_schedule(1.0, condition, accuracy)[0]) + 1


def _schedule(low: float, high: float, accuracy: float) -> tuple[list[float], float]:
    """The rates g of the layers before the last one, and the least eigenvalue there."""
    if not 0 < low <= high < math.inf:
        raise ValueError(f"low must be positive and at most high, got {low} and {high}")
    if not accuracy > 0:
        raise ValueError(f"accuracy must be positive, got {accuracy}")
    rates: list[float] = []
    # The excess of the condition number, kept apart from 1: it falls below float64's resolution.
    excess, mu, nu = (high - low) / low, low, high
    while excess > accuracy:
        rate = 1 / (3 * nu)
        rates.append(rate)
        # With nu = (1 + e) mu the ratio 4/9 nu over mu (1 - mu / 3 nu)² is
        # 4 (1 + e)³ / (2 + 3 e)², and that less 1 is e² (3 + 4 e) / (2 + 3 e)².
        after = excess**2 * (3 + 4 * excess) / (2 + 3 * excess) ** 2
        mu, nu, excess = mu * (1 - rate * mu) ** 2, nu * 4 / 9, after
    return rates, mu


def two_noise_ridge(first: float, second: float, *, dim: int, context: int) -> LinearTransformer:
    """Two layers that shrink as ridge regression does for either of two noises.

    For features N(0, I / n) and many examples S is I, and the best weights are
    sum y x / (1 + sigma²). The first layer takes a step of size A; what is left of the labels has
    the sum of squares n sigma², and the second rescales by 1 + w_yy n sigma²:

        A (1 + n sigma² w_yy) = 1 / (1 + sigma²)  at both,
        A = (1 + s² + t²) / ((1 + s²)(1 + t²)),   n A w_yy = -1 / ((1 + s²)(1 + t²)).

    Args:
        first, second: the two standard deviations s and t.
        context: n.

    Vladymyrov et al. 2024, theorem 5.2.
    """
    if first < 0 or second < 0 or context < 1:
        raise ValueError(
            f"first and second must not be negative and context at least 1, "
            f"got {first}, {second} and {context}"
        )
    both = (1 + first**2) * (1 + second**2)
    step = (1 + first**2 + second**2) / both
    rescale = -1 / (both * step * context)
    p = torch.tensor([[[0.0, -step]], [[0.0, rescale]]], dtype=torch.float64)
    q = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], dtype=torch.float64)
    return LinearTransformer.from_parameters("diag", p, q, dim)


def _positive_steps(name: str, values: Sequence[float]) -> Tensor:
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError(f"{name} must be one or more positive numbers, got {list(values)}")
    return torch.tensor(list(values), dtype=torch.float64)
