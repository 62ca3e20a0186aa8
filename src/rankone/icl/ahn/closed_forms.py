"""What trained models stand beside: Theorem 1, gradient descent, least squares, exact optima."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from rankone.icl.ahn.layers import Family, Matrices, count_b, losses
from rankone.icl.ahn.problem import Problem, Sample
from rankone.icl.ahn.quasi_newton import minimise
from rankone.icl.ahn.spectrum import degree, quadrature, residual

Method = Literal["gd", "pgd"]


def theorem1_minimum(problem: Problem) -> Float[Tensor, "d d"]:
    """The A of the global minimum for one layer and w ~ N(0, I) (Theorem 1).

    A = -Uᵀ diag(1 / ((n+1)/n λ_i + (1/n) sum_k λ_k)) U, up to a factor that P takes back.
    """
    values = torch.tensor(problem.eigenvalues, dtype=torch.float64)
    n = problem.context
    scale = 1 / ((n + 1) / n * values + values.sum() / n)
    U = problem.rotation
    return -U.mT @ (scale[:, None] * U)


def theorem1_loss(A: Float[Tensor, "*R d d"], problem: Problem) -> Float[Tensor, "*R"]:
    """The exact loss of one layer for w ~ N(0, I): tr Σ + 2 tr Σ A Σ + tr Aᵀ Σ A E[Sx Σ Sx].

    For Sx = (1/n) sum x xᵀ, E[Sx Σ Sx] = (n+1)/n Σ³ + (1/n) tr(Σ²) Σ; here in white coordinates,
    where the mean of S V S is (n+1)/n V + (1/n) tr(V) I.
    """
    if problem.weights != "identity":
        raise ValueError(f"weights must be 'identity' for Theorem 1, got {problem.weights!r}")
    V, n = problem.covariance, problem.context
    root = problem.power(0.5)
    white = root @ A @ root
    second = (n + 1) / n * V + V.trace() / n * torch.eye(len(V), dtype=V.dtype)
    products = 2 * V @ white + white.mT @ second @ white
    return V.trace() + products.diagonal(dim1=-2, dim2=-1).sum(-1)


def descent(problem: Problem, method: Method, steps: int, rates: Float[Tensor, " R"]) -> Matrices:
    """Steps of gradient descent on R(w) = (1/2n) sum (<w, x_i> - y_i)², as models (Lemma 1).

    gd has A = -rate I in every layer, pgd has A = -rate Σ⁻¹.
    """
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    one = problem.power(0.0 if method == "gd" else -1.0)
    A = -rates[:, None, None, None] * one.repeat(steps, 1, 1)
    return Matrices(A, A[:, :0])


def best_rate(problem: Problem, method: Method, steps: int, sample: Sample) -> float:
    """The rate with the least mean loss on these prompts, one rate for all steps; to 0.2 %."""
    low, high = 1e-3, 30.0
    for _ in range(3):
        rates = torch.logspace(math.log10(low), math.log10(high), 41, dtype=torch.float64)
        models = descent(problem, method, steps, rates)
        mean = (losses(models, sample.grams, problem) * sample.importance).mean(1)
        best = int(mean.nan_to_num(torch.inf).argmin())
        low, high = float(rates[max(best - 1, 0)]), float(rates[min(best + 1, 40)])
    return float(rates[best])


def least_squares_loss(dim: int, examples: int) -> float:
    """The loss of least squares for w ~ N(0, Σ⁻¹), of least norm |Σ^½ w| with few examples.

    Without noise it is right along the examples and says 0 across them: max(0, d - n), which is
    the least that any predictor can reach.
    """
    return float(max(0, dim - examples))


class Optimum(NamedTuple):
    """A minimum over models whose matrices are multiples of the identity."""

    loss: float
    """The exact expectation of the loss."""
    a: list[float]
    b: list[float]
    found: int
    """How many of the searches ended there."""


def exact_optima(
    family: Family,
    layers: int,
    *,
    context: int,
    dim: int = 5,
    searches: int = 64,
    seed: int = 0,
    iterations: int = 1500,
) -> list[Optimum]:
    """The minima of the exact loss over a_l and b_l that searches from random values find.

    Best first; their number grows with the depth. In the family of Theorem 3 layers can change
    places: minima that differ by that only are one, with the smallest step first.
    """
    shared = count_b(family, layers)
    if searches < 1:
        raise ValueError(f"searches must be at least 1, got {searches}")
    s, weight = quadrature(dim, context, degree(layers, shared) + 1)
    g = Generator().manual_seed(seed)
    x = torch.rand(searches, layers + shared, generator=g, dtype=torch.float64)
    # Later layers see smaller eigenvalues: steps that grow find the best minima most often.
    x[:, :layers] *= -0.6 * 4.0 ** torch.arange(layers, dtype=x.dtype)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        r = residual(leaf[:, :layers], leaf[:, layers:], s)
        value = (r.square() * weight).sum(1).log()
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

    state = minimise(function, x, iterations=iterations, tolerance=1e-13)
    optima: list[Optimum] = []
    for row in state.value.argsort():
        value = float(state.value[row].exp())
        if optima and value < optima[-1].loss * (1 + 1e-5):
            optima[-1] = optima[-1]._replace(found=optima[-1].found + 1)
        else:
            a, b = state.x[row, :layers], state.x[row, layers:]
            a = a if shared else a.sort(descending=True).values
            optima.append(Optimum(value, a.tolist(), b.tolist(), 1))
    return optima


__all__ = [
    "Method",
    "Optimum",
    "best_rate",
    "descent",
    "exact_optima",
    "least_squares_loss",
    "theorem1_loss",
    "theorem1_minimum",
]
