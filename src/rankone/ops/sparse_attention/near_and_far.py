"""One softmax over the window before a token and over more keys the further it is."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rankone.ops.sparse_attention.dense import attention

CHUNK = 256
"""Queries that are worked on together, at least."""


def near_and_far(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S H K"],
    v: Float[Tensor, "B S H V"],
    far_k: Float[Tensor, "B R H K"],
    far_v: Float[Tensor, "B R H V"],
    *,
    window: int,
    visible: Int[Tensor, " T"],
    near_seen: Bool[Tensor, "B S"],
    far_seen: Bool[Tensor, "B R"],
    scale: float | None = None,
) -> Float[Tensor, "B T H V"]:
    """Causal attention of the last T of S tokens to `window` tokens before each and to far keys.

    Token t sees itself and the `window` tokens before it, and of the far keys the first
    `visible[t]`, a number that never falls. Time O(T (window + R)), memory O(T) and the far keys
    once for every `CHUNK` queries.

    Zhu et al. 2021, section 3.4.
    """
    T, S, R = q.shape[1], k.shape[1], far_k.shape[1]
    size = max(CHUNK, window)
    outputs = []
    for first in range(0, T, size):
        last = min(first + size, T)
        begin = max(0, S - T + first - window)
        end = S - T + last
        i = torch.arange(S - T + first, end, device=q.device)[:, None]
        j = torch.arange(begin, end, device=q.device)
        band = (j <= i) & (j >= i - window)
        reached = torch.arange(R, device=q.device) < visible[first:last, None]
        seen = torch.cat([band & near_seen[:, None, begin:end], reached & far_seen[:, None]], dim=2)
        keys = torch.cat([k[:, begin:end], far_k], dim=1)
        values = torch.cat([v[:, begin:end], far_v], dim=1)
        part = attention(
            *(x.transpose(1, 2) for x in (q[:, first:last], keys, values)),
            seen=seen[:, None],
            scale=scale,
        )
        outputs.append(part.transpose(1, 2))
    return torch.cat(outputs, dim=1)
