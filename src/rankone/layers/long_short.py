"""Transformer-LS: a dynamic low-rank view of everything far, and a window of what is near."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rankone.layers.base import Compact, Facts, Layer, append
from rankone.ops.sparse_attention import window_attention
from rankone.ops.sparse_attention.near_and_far import near_and_far


class LongShortState(NamedTuple):
    """What a token sees of those before it: projected chunks, the window, the open chunk."""

    far_k: Float[Tensor, "B S H K"]
    far_v: Float[Tensor, "B S H V"]
    k: Float[Tensor, "B W H K"]
    v: Float[Tensor, "B W H V"]
    mask: Bool[Tensor, "B W"]
    open: Float[Tensor, "B C D"]
    """Inputs of the chunk that is not complete."""
    open_mask: Bool[Tensor, "B C"]


class LongShort(Layer):
    """One softmax over r projected keys and over the keys of a window.

    P = softmax over tokens of x W_P makes K̃ = Pᵀ K and Ṽ = Pᵀ V; two layer norms, one for what is
    in the window and one for what is projected, bring both to one scale.

    Causal, chunks of tokens are projected one by one, and a token sees the chunks that ended before
    its own chunk began and the tokens of its window. That is linear in T only as long as T / chunk
    is small.

    Args:
        rank: r, projected keys; causal, of each chunk.
        window: tokens on each side; causal, before the token.
        chunk: tokens of a chunk; causal only.
        impl: of the window where the layer is not causal, see
            `rankone.ops.sparse_attention.window_attention`.

    Zhu et al. 2021, sections 3.2 to 3.4, without the relative positions of its language models.
    """

    name = "long_short"
    facts = Facts(
        title="Long-Short Transformer",
        paper="Zhu et al. 2021",
        cost="T; causal T + r T² / chunk",
        state="window, and r keys and values a chunk",
        exact="softmax attention if window >= T and r = 0 (without norms)",
        causal=True,
        streams=True,
    )

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        rank: int | None = None,
        window: int = 128,
        chunk: int = 16,
        impl: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(dim, heads, **options)
        rank = (1 if self.causal else 32) if rank is None else rank
        if rank < 1 or window < 0 or chunk < 1:
            raise ValueError(
                f"rank and chunk must be at least 1 and window at least 0, "
                f"got {rank}, {chunk} and {window}"
            )
        self.rank, self.window, self.chunk, self.impl = rank, window, chunk, impl
        inner = heads * self.head_dim
        self.projection = nn.Linear(dim, heads * rank)
        self.near_norm, self.far_norm = nn.LayerNorm(inner), nn.LayerNorm(inner)

    def mix(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Everything projected, and the window."""
        compact = Compact.of(x, mask)
        if self.causal:
            return compact.restore(self._chunks(compact.x, compact.mask, None)[0])
        q, k, v = self.project(compact.x)
        k, v = self._normed(self.near_norm, k), self._normed(self.near_norm, v)
        far = self._far(compact.x[:, None], k[:, None], v[:, None], _one(compact.mask))
        output = window_attention(
            q, k, v, window=self.window, seen=compact.mask, shared=far, impl=self.impl
        )
        return compact.restore(output)

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Of all heads of a token together."""
        return self._heads(norm(x.flatten(-2)))

    def _far(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Chunks [B, N, C, …] to r projected keys and values each, [B, N r, H, K]."""
        scores = torch.unflatten(self.projection(x), -1, (self.heads, self.rank))  # [B, N, C, H, r]
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if mask is not None:
            empty = ~mask.any(2, keepdim=True)
            scores = scores.masked_fill(~(mask | empty)[..., None, None], -torch.inf)
        weights = scores.softmax(2).to(v.dtype)
        found = (torch.einsum("bnchr,bnchk->bnrhk", weights, y).flatten(1, 2) for y in (k, v))
        far_k, far_v = (self._normed(self.far_norm, y) for y in found)
        return far_k, far_v

    def stream(
        self, x: Tensor, mask: Tensor | None, state: LongShortState | None
    ) -> tuple[Tensor, LongShortState]:
        """By chunks, where a state can only be that of sequences of one length."""
        if mask is not None:
            raise ValueError(
                "long_short counts the tokens of its chunks: a state needs sequences without "
                "padding, so no mask"
            )
        return self._chunks(x, None, state)

    def _chunks(
        self, x: Tensor, mask: Tensor | None, state: LongShortState | None
    ) -> tuple[Tensor, LongShortState]:
        """Chunks that are complete are projected; of the open one the inputs are kept."""
        B, T, _ = x.shape
        real = x.new_ones(B, T, dtype=torch.bool) if mask is None else mask
        q, k, v = self.project(x)
        near = [self._normed(self.near_norm, y) for y in (k, v)]
        opened = x if state is None else append([state.open, x])
        opened_mask = real if state is None else append([state.open_mask, real])
        before = 0 if state is None else state.open.shape[1]  # tokens of the open chunk
        done = opened.shape[1] // self.chunk * self.chunk
        chunks = torch.unflatten(opened[:, :done], 1, (-1, self.chunk))
        chunk_mask = torch.unflatten(opened_mask[:, :done], 1, (-1, self.chunk))
        far = self._far(
            chunks, self._heads(self.key(chunks)), self._heads(self.value(chunks)), chunk_mask
        )
        far_real = chunk_mask.any(2).repeat_interleave(self.rank, 1)
        old = 0
        if state is not None:
            old = state.far_k.shape[1]
            far = append([state.far_k, far[0]]), append([state.far_v, far[1]])
            near = [append([state.k, near[0]]), append([state.v, near[1]])]
            far_real = append([state.mask.new_ones(B, old), far_real])
        seen_mask = real if state is None else append([state.mask, real])
        # A token sees the chunks that ended before its own began.
        own = (before + torch.arange(T, device=x.device)) // self.chunk
        visible = old + own * self.rank
        output = near_and_far(
            q, near[0], near[1], far[0], far[1], window=self.window, visible=visible,
            near_seen=seen_mask, far_seen=far_real,
        )  # fmt: skip
        first = max(0, near[0].shape[1] - self.window)
        after = LongShortState(
            *far,
            near[0][:, first:],
            near[1][:, first:],
            seen_mask[:, first:],
            opened[:, done:],
            opened_mask[:, done:],
        )
        return output, after


def _one(mask: Tensor | None) -> Tensor | None:
    """A mask for one chunk."""
    return None if mask is None else mask[:, None]
