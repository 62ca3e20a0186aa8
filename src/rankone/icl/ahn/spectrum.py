"""Exact means over prompts for models whose matrices are multiples of the identity.

Where Σ^½ A_l Σ^½ = a_l I and B_l = b_l I, as Theorems 3 and 4 of Ahn et al. 2023 have it, the error
is a polynomial of S, with s for its eigenvalues:

    r_{l+1} = r_l (1 + a_l s m_l²),   m_{l+1} = m_l (1 + b_l a_l s m_l²),   r_0 = m_0 = 1,

and the loss is E tr r_L(S)², with n S a Wishart matrix. Its degree is 2 for each layer of Theorem
3, and 26 for three layers of Theorem 4: rare prompts with a large eigenvalue decide about it, which
no sample shows. Here the mean is exact: the moments of Wishart matrices are rational numbers, and
Gauss quadrature from them is exact for polynomials.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor


def wishart_moment(degree: int, dim: int, samples: int) -> Fraction:
    """E tr (G Gᵀ)^degree for a dim × samples matrix G of independent standard normal numbers.

    The power sum is a sum over Jack polynomials of parameter 2 (zonal polynomials), whose means
    are known: Macdonald, Symmetric Functions and Hall Polynomials, VI.10; Muirhead 1982, 7.2.
    Partitions with a box in row 3 and column 2 have coefficient 0; the others are (i, j, 1, …, 1).

    >>> wishart_moment(1, 5, 20), wishart_moment(2, 5, 20)
    (Fraction(100, 1), Fraction(2600, 1))
    """
    if degree == 0:
        return Fraction(dim)
    total = Fraction(0)
    for i in range(1, degree + 1):
        for j in range(min(i, degree - i) + 1):
            ones = degree - i - j
            partition = [i, j] + [1] * ones if j else [i]
            if (j or not ones) and len(partition) <= min(dim, samples):
                total += _zonal_term(partition, dim, samples)
    return total


def _zonal_term(partition: list[int], dim: int, samples: int) -> Fraction:
    """What one partition contributes to the mean of a power sum."""
    columns = [sum(1 for row in partition if row > c) for c in range(partition[0])]
    above, below = 2 * sum(partition), 1
    for r, row in enumerate(partition):
        for c in range(row):
            arm, leg, content = row - c - 1, columns[c] - r - 1, 2 * c - r
            above *= (dim + content) * (samples + content) * (content if r or c else 1)
            below *= (2 * arm + leg + 1) * (2 * arm + leg + 2)
    return Fraction(above, below)


@cache
def quadrature(
    dim: int, context: int, nodes: int
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
    """Nodes s and weights with sum weights f(s) = E tr f(S), S = Wishart / context.

    Exact for polynomials f of degree 2 nodes - 1. The recurrence of the orthogonal polynomials
    comes from the moments by Chebyshev's algorithm in rational arithmetic, the nodes are the
    eigenvalues of its Jacobi matrix (Golub and Welsch 1969).
    """
    moments = [wishart_moment(k, dim, context) / Fraction(context) ** k for k in range(2 * nodes)]
    before, row = [Fraction(0)] * (2 * nodes), moments
    alpha, beta = [moments[1] / moments[0]], [moments[0]]
    for k in range(1, nodes):
        after = [Fraction(0)] * (2 * nodes)
        for m in range(k, 2 * nodes - k):
            after[m] = row[m + 1] - alpha[-1] * row[m] - beta[-1] * before[m]
        alpha.append(after[k + 1] / after[k] - row[k] / row[k - 1])
        beta.append(after[k] / row[k - 1])
        before, row = row, after
    diagonal, side = (
        torch.tensor([float(x) for x in part], dtype=torch.float64) for part in (alpha, beta)
    )
    return _nodes(diagonal, side.sqrt())


def _nodes(alpha: Tensor, root_beta: Tensor) -> tuple[Tensor, Tensor]:
    """Weights are 1 / sum_k p_k(s)² of the orthonormal polynomials: tiny ones are accurate too."""
    side = root_beta[1:]
    s = torch.linalg.eigvalsh(alpha.diag() + side.diag(1) + side.diag(-1))
    before, p = torch.zeros_like(s), torch.ones_like(s) / root_beta[0]
    total = p.square()
    for k in range(len(side)):
        back = side[k - 1] * before if k else 0.0
        before, p = p, ((s - alpha[k]) * p - back) / side[k]
        total = total + p.square()
    return s, 1 / total


def residual(
    a: Float[Tensor, "*R L"], b: Float[Tensor, "*R K"], s: Float[Tensor, " N"]
) -> Float[Tensor, "*R N"]:
    """r_L(s) of models with multiples a_l and b_l of the identity; no b stands for b = 0."""
    r = m = torch.ones_like(a[..., :1] * s)
    for layer in range(a.shape[-1]):
        step = a[..., layer, None] * s * m.square()
        r = r * (1 + step)
        if layer < b.shape[-1]:
            m = m * (1 + b[..., layer, None] * step)
    return r


def degree(layers: int, shared: int) -> int:
    """The degree of r_L; `shared` is the number of b.

    >>> degree(3, 0), degree(3, 2)
    (3, 13)
    """
    r = m = 0
    for layer in range(layers):
        r, m = r + 2 * m + 1, m + (2 * m + 1 if layer < shared else 0)
    return r


def expected_loss(
    a: Float[Tensor, "*R L"], b: Float[Tensor, "*R K"], *, context: int, dim: int = 5
) -> Float[Tensor, "*R"]:
    """E tr r_L(S)², exactly: the loss over all prompts, for w ~ N(0, Σ⁻¹).

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> expected_loss(-20 / 26 * one, one[:0], context=20)
    tensor(1.1538, dtype=torch.float64)
    """
    nodes = degree(a.shape[-1], b.shape[-1]) + 1
    s, weight = quadrature(dim, context, nodes)
    return (residual(a.double(), b.double(), s).square() * weight).sum(-1)


__all__ = ["degree", "expected_loss", "quadrature", "residual", "wishart_moment"]
