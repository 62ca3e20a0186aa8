"""Softmax attention, what all others are measured against."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankone.layers.base import Facts, Layer, append
from rankone.ops.sparse_attention import attention


class KeysValues(NamedTuple):
    """All keys and values so far, and which of them are real; None if all are."""

    k: Float[Tensor, "B T H K"]
    v: Float[Tensor, "B T H V"]
    mask: Bool[Tensor, "B T"] | None


class Softmax(Layer):
    """Σ_j softmax_j(q_i·k_j / √K) v_j over all tokens, or over those up to i.

    Computed by PyTorch's fused attention, in time O(T² K) and memory O(T K).

    Vaswani et al. 2017, equation 1.
    """

    name = "softmax"
    facts = Facts(
        title="softmax attention",
        paper="Vaswani et al. 2017",
        cost="T²",
        state="all keys and values",
        exact="softmax attention",
        causal=True,
        streams=True,
        cross=True,
    )

    def mix(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """All at once."""
        if not self.causal:
            return self.cross(x, x, mask)
        if mask is None:
            q, k, v = (y.transpose(1, 2) for y in self.project(x))
            output = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return output.transpose(1, 2)
        return self.stream(x, mask, None)[0]

    def cross(self, x: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        """Queries of x, keys and values of the context."""
        q = self._heads(self.query(x))
        k, v = self._heads(self.key(context)), self._heads(self.value(context))
        seen = None if mask is None else mask[:, None, None]
        return attention(*(y.transpose(1, 2) for y in (q, k, v)), seen=seen).transpose(1, 2)

    def stream(
        self, x: Tensor, mask: Tensor | None, state: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:
        """New queries see all keys up to their own."""
        q, k, v = self.project(x)
        real = mask
        if state is not None:
            if mask is not None or state.mask is not None:
                real = append([_all(state.k, state.mask), _all(k, mask)])
            k, v = append([state.k, k]), append([state.v, v])
        after = KeysValues(k, v, real)
        T, S = q.shape[1], k.shape[1]
        seen = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)[None, None]
        if real is not None:
            seen = seen & real[:, None, None]
        output = attention(*(y.transpose(1, 2) for y in (q, k, v)), seen=seen)
        return output.transpose(1, 2), after


def _all(k: Tensor, mask: Tensor | None) -> Tensor:
    """A mask, also where none was given."""
    return torch.ones(k.shape[:2], dtype=torch.bool, device=k.device) if mask is None else mask
