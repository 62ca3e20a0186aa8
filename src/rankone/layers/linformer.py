"""Linformer: keys and values of a sequence projected to a fixed number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rankone.layers.base import Compact, Facts, Layer
from rankone.ops.low_rank import projected_attention

SHARING = ("none", "headwise", "key-value")


class Projections(nn.Module):
    """E and F [H or 1, R, N], columns of which project sequences of up to N tokens.

    Args:
        rank: R, keys and values that are left.
        max_length: N.
        heads: H.
        share: none: two for every head; headwise: two for all heads; key-value: one for all heads
            and for both keys and values. One module that is given to all layers of a model is the
            paper's layerwise sharing.
    """

    def __init__(
        self, rank: int, max_length: int, heads: int = 1, *, share: str = "key-value"
    ) -> None:
        super().__init__()
        if share not in SHARING:
            raise ValueError(f"share must be one of {', '.join(SHARING)}, got {share!r}")
        if rank < 1 or max_length < 1:
            raise ValueError(f"rank and max_length must be at least 1, got {rank} and {max_length}")
        shape = heads if share == "none" else 1, rank, max_length
        self.keys = nn.Parameter(torch.randn(shape) * max_length**-0.5)
        self.own_values: nn.Parameter | None = None
        if share != "key-value":
            self.own_values = nn.Parameter(torch.randn(shape) * max_length**-0.5)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """E and F for sequences of a length."""
        longest = self.keys.shape[2]
        if length > longest:
            raise ValueError(
                f"sequences may have up to max_length = {longest} tokens, got {length}"
            )
        keys = self.keys[..., :length]
        return keys, keys if self.own_values is None else self.own_values[..., :length]


class Linformer(Layer):
    """softmax(Q (E K)ᵀ / √K) (F V) with learned E and F [R, N].

    Shorter sequences take the first columns of E and F; padding is taken out before, wherever it
    is. Causal it cannot be: a row of E K mixes all tokens.

    Args:
        rank: R.
        max_length: N, the longest sequence that can come.
        share: none, headwise or key-value; see `Projections`.
        projections: E and F that are shared with other layers, instead of rank, max_length, share.

    Wang et al. 2020, equation 7 and section 4.
    """

    name = "linformer"
    facts = Facts(
        title="Linformer",
        paper="Wang et al. 2020",
        cost="T",
        state="-",
        exact="softmax attention if E = F = I",
    )

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        rank: int = 64,
        max_length: int = 4096,
        share: str = "key-value",
        projections: Projections | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dim, heads, **options)
        self.projections = projections or Projections(rank, max_length, heads, share=share)

    def mix(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Attention to R projected keys."""
        compact = Compact.of(x, mask)
        keys, values = self.projections(x.shape[1])
        output = projected_attention(*self.project(compact.x), keys, values, mask=compact.mask)
        return compact.restore(output)
