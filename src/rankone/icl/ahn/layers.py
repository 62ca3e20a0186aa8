"""The two families of Ahn et al. 2023 on white Gram matrices.

A layer adds (1/n) P G Q e to every token e, with G the Gram matrix of the context tokens,

    P_l = [B_l 0; 0 1],   Q_l = [A_l 0; 0 0]:   Theorem 4, and Theorem 3 where all B_l = 0.

Then x_i^l = M_l x_i for all tokens and y_i^l = <w* - w_l, x_i>, with

    M_{l+1} = M_l + B_l (M_l S M_lᵀ) A_l M_l,      M_0 = I,
    r_{l+1} = r_l + (A_l M_l)ᵀ M_l S r_l,          r_l = w* - w_l,  r_0 = w*.

With B = 0 and A_l = -(preconditioner) this is preconditioned gradient descent (their Lemma 1).
White coordinates keep the form: A becomes Σ^½ A Σ^½, and B becomes Σ^-½ B Σ^½. The prediction
does not depend on the last B, which is left out here: there are L matrices A and L - 1 matrices B.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from rankone.icl.ahn.problem import Problem
from rankone.icl.ahn.products import one_thread, product
from rankone.icl.model import LinearTransformer

Family = Literal["theorem3", "theorem4"]
FAMILIES: tuple[Family, ...] = get_args(Family)

CHUNK = 6000
"""Matrices that are worked on at once: what fits into the caches."""


class Matrices(NamedTuple):
    """The trained matrices of several models; K is L - 1, or 0 in the family of Theorem 3."""

    A: Float[Tensor, "*R L d d"]
    B: Float[Tensor, "*R K d d"]


def count_b(family: Family, layers: int) -> int:
    """The number of matrices B that are trained."""
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    if layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers}")
    return layers - 1 if family == "theorem4" else 0


def whiten(matrices: Matrices, problem: Problem) -> Matrices:
    """Σ^½ A Σ^½ and Σ^-½ B Σ^½."""
    root, inverse = (problem.power(p).to(matrices.A) for p in (0.5, -0.5))
    return Matrices(root @ matrices.A @ root, inverse @ matrices.B @ root)


def unwhiten(white: Matrices, problem: Problem) -> Matrices:
    """The inverse of `whiten`."""
    root, inverse = (problem.power(p).to(white.A) for p in (0.5, -0.5))
    return Matrices(inverse @ white.A @ inverse, root @ white.B @ inverse)


def residuals(
    white: Matrices, grams: Float[Tensor, "d d R2 N"], start: Float[Tensor, "d d"]
) -> Float[Tensor, "d d R N"]:
    """The maps from white noise to the errors v* - v_L, for every run and prompt.

    `start` is a root of the covariance of v* (`Problem.start`). The Gram matrices are shared by all
    runs if R2 is 1.
    """
    A, B = (part.permute(1, 2, 3, 0)[..., None] for part in white)
    r = start.to(grams)[:, :, None, None]
    M = torch.eye(len(start), dtype=grams.dtype)[:, :, None, None]
    for layer in range(len(A)):
        first = layer == 0
        a = A[layer] if first else product(A[layer], M)
        key = grams if first else product(M, grams)
        r = r + product(a.transpose(0, 1), product(key, r))
        if layer < len(B):
            square = grams if first else product(key, M.transpose(0, 1))
            M = M + product(B[layer], product(square, a))
    return r


def losses(
    matrices: Matrices, grams: Float[Tensor, "d d R2 N"], problem: Problem
) -> Float[Tensor, "R N"]:
    """E[(prediction - truth)²] of every run and prompt, in the mean over its query and weights."""
    white = Matrices(*(part.to(grams.dtype) for part in whiten(matrices, problem)))
    start = problem.start.to(grams)
    size = max(1, CHUNK // matrices.A.shape[0])
    with one_thread():
        parts = [
            residuals(white, part, start).square().sum((0, 1))
            for part in torch.split(grams, size, dim=3)
        ]
    return torch.cat(parts, dim=1)


def as_transformer(matrices: Matrices, context: int) -> LinearTransformer:
    """One model, `A` [L, d, d], as a `LinearTransformer`, which has no 1/n: that goes into Q.

    >>> gd = Matrices(-0.5 * torch.eye(5).repeat(2, 1, 1), torch.zeros(0, 5, 5))
    >>> as_transformer(gd, context=20).layers
    2
    """
    A, B = matrices
    layers, dim = A.shape[:2]
    P, Q = A.new_zeros(2, layers, 1, dim + 1, dim + 1)
    P[:, :, -1, -1] = 1
    P[: len(B), 0, :-1, :-1] = B
    Q[:, 0, :-1, :-1] = A / context
    return LinearTransformer.from_matrices(P, Q)


__all__ = [
    "FAMILIES",
    "Family",
    "Matrices",
    "as_transformer",
    "count_b",
    "losses",
    "residuals",
    "unwhiten",
    "whiten",
]
