"""GD++ never beats ridge regression with one variance for all prompts.

A GD++ layer with w_xy = w_yy = 0 multiplies labels by nothing that depends on labels, so its
weights are F(X) sum y x with F a function of the features alone. Over w ~ N(0, I) and noise,
E[alpha alphaᵀ | X] = S² + E[sigma²] S and E[w alphaᵀ | X] = S, so that the best F of all is
(S + E[sigma²] I)⁻¹: constant ridge. To adapt to the noise of a prompt takes w_xy or w_yy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rankone.icl.model import LinearTransformer


class Floor(NamedTuple):
    """Expected losses over weights and noise, means over the feature matrices that were given."""

    model: float
    constant_ridge: float
    gap: float
    """What the model loses to constant ridge: never negative."""


def gdpp_floor(
    model: LinearTransformer, features: Float[Tensor, "B d d"], variance: float
) -> Floor:
    """The exact loss of a GD++ model beside its floor.

    Both are averaged over w ~ N(0, I), the noise, and a query x ~ N(0, I), for each S = sum x xᵀ
    in `features`: ½ tr((F S - I)(F S - I)ᵀ + E[sigma²] F S Fᵀ). The gap is
    ½ tr((F - F*) (S² + E[sigma²] S) (F - F*)ᵀ) for F* = (S + E[sigma²] I)⁻¹, a sum of squares.

    Args:
        model: of the kind gd++.
        features: S of some prompts.
        variance: E[sigma²].

    Raises ValueError for other kinds: theirs is no such F.
    """
    if model.kind != "gd++":
        raise ValueError(f"the floor is that of gd++ models, got a {model.kind} one")
    if variance < 0:
        raise ValueError(f"variance must not be negative, got {variance}")
    d = model.dim
    if features.dim() != 3 or features.shape[1:] != (d, d):
        raise ValueError(f"features must have shape [B, {d}, {d}], got {tuple(features.shape)}")
    S = features.to(model.p.dtype)
    eye = torch.eye(d, dtype=S.dtype, device=S.device)
    F, best = response(model, S), torch.linalg.inv(S + variance * eye)
    moment = S @ S + variance * S
    gap = ((F - best) @ moment * (F - best)).sum((1, 2)) / 2
    ridge = ((best @ S - eye).square().sum((1, 2)) + variance * (best @ S * best).sum((1, 2))) / 2
    return Floor(*(float(x.detach().mean()) for x in (ridge + gap, ridge, gap)))


def response(model: LinearTransformer, S: Float[Tensor, "B d d"]) -> Float[Tensor, "B d d"]:
    """F of a GD++ model: its weights are F sum y x.

        M ← M + w_xx (M S M) M,    F ← F - w_yx M M (I - S F)

    S, M and F commute.
    """
    eye = torch.eye(S.shape[1], dtype=S.dtype, device=S.device)
    M, F = eye.expand_as(S), torch.zeros_like(S)
    for p, q in zip(model.p, model.q, strict=True):
        w_xx, w_yx = (p[:, :1] * q).sum(), (p[:, 1:] * q).sum()
        M, F = M + w_xx * M @ S @ M @ M, F - w_yx * M @ M @ (eye - S @ F)
    return F
