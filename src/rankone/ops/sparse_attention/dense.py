"""Softmax attention over keys that are all there, with masks in which a row may be empty."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Σ_j softmax_j(scale q_i·k_j) v_j over the keys that a query sees, 0 where it sees none.

    Shapes [B, H, T, K], keys [B, H, S, K] and [B, H, S, V], `seen` bool and broadcast to
    [B, H, T, S].
    """
    if seen is None:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
    # A row without keys would be NaN, and so would its gradient: it sees everything instead.
    empty = ~seen.any(dim=-1, keepdim=True)
    output = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen | empty, scale=scale
    )
    return output.masked_fill(empty, 0.0)
