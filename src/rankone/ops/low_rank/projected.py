"""Softmax attention over keys and values whose number was reduced by a projection."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankone.ops.sparse_attention import attention


def projected_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S H K"],
    v: Float[Tensor, "B S H V"],
    keys: Float[Tensor, "#H R S"],
    values: Float[Tensor, "#H R S"],
    *,
    mask: Bool[Tensor, "B S"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "B T H V"]:
    """softmax(q (E k)ᵀ scale) (F v), with E = `keys` and F = `values`.

    Masked keys and values are 0 before they are projected. With R = S and the identity for both it
    is softmax attention. Time and memory O(T R + S R).

    Wang et al. 2020, equation 7.
    """
    if mask is not None:
        k, v = (x * mask[..., None, None] for x in (k, v))
    few = [
        torch.einsum("hrs,bshk->bhrk", e.expand(k.shape[2], -1, -1).to(x.dtype), x)
        for e, x in ((keys, k), (values, v))
    ]
    return attention(q.transpose(1, 2), *few, scale=scale).transpose(1, 2)
