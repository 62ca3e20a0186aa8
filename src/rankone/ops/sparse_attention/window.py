"""Attention to the neighbours of a token and to a few keys that all tokens share.

The sequence is cut into chunks, and the queries of a chunk meet the keys of the chunk and of the
window around it, all chunks side by side: time and memory are linear in T, and no more than a chunk
of keys is looked at in vain. With a dilation of d, tokens that are congruent modulo d have a window
of their own.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankone.ops.sparse_attention import flex
from rankone.ops.sparse_attention.dense import attention

SMALLEST = 64
"""Queries of a chunk at least."""


def window_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    *,
    window: int,
    dilation: int = 1,
    causal: bool = False,
    seen: Bool[Tensor, "B T"] | None = None,
    shared: tuple[Float[Tensor, "B S H K"], Float[Tensor, "B S H V"]] | None = None,
    shared_seen: Bool[Tensor, "B S"] | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Float[Tensor, "B T H V"]:
    """Softmax attention of every token to its window and to shared keys, in one softmax.

    Token i sees tokens i + d m for |m| <= window, m <= 0 if causal, with d the dilation, and all
    shared keys.

    Args:
        window: tokens on each side; 0 for the token alone.
        dilation: distance of the tokens in a window.
        seen: False for tokens that no window holds (padding, or tokens that are shared keys).
        shared: keys and values that every token sees.
        shared_seen: False for shared keys that are not there.
        scale: K^-0.5 by default.
        impl: auto, chunked (any device) or flex (FlexAttention, on a GPU).

    A token that sees nothing gets 0. Cost: time O(T (window + S) (K + V)).

    Example: with a window of 1 and equal scores, tokens are averages of three.
        >>> q = k = torch.zeros(1, 5, 1, 1)
        >>> v = torch.tensor([0.0, 3.0, 6.0, 9.0, 12.0]).view(1, 5, 1, 1)
        >>> window_attention(q, k, v, window=1).flatten()
        tensor([ 1.5000,  3.0000,  6.0000,  9.0000, 10.5000])

    Beltagy et al. 2020, section 3.1.
    """
    if window < 0:
        raise ValueError(f"window must be at least 0, got {window}")
    if dilation < 1:
        raise ValueError(f"dilation must be at least 1, got {dilation}")
    B, T = q.shape[:2]
    residues = min(dilation, T)
    if flex.choose(impl, q.device, dtype=q.dtype) == "flex":
        return _by_flex(q, k, v, residues, window, causal, seen, shared, shared_seen, scale)
    length = -(-T // residues)
    span = min(window, length - 1)  # what lies beyond is nothing
    size = min(length, max(span, SMALLEST))
    cut = _Cut(B, T, residues, size, -(-length // size), span, 0 if causal else span)
    inside = q.new_ones(B, T, dtype=torch.bool) if seen is None else seen
    chunks = cut.chunks(q), cut.windows(k), cut.windows(v)
    there = cut.windows(inside[..., None, None])[:, 0, None, :, 0] & cut.band(q.device)
    queries, keys, values = chunks
    if shared is not None:
        more = (_repeat(x, cut.copies).movedim(1, 2) for x in shared)
        keys, values = (torch.cat(pair, dim=2) for pair in zip((keys, values), more, strict=True))
        others = q.new_ones(B, shared[0].shape[1], dtype=torch.bool)
        others = others if shared_seen is None else shared_seen
        others = _repeat(others, cut.copies)[:, None, :].expand(-1, size, -1)
        there = torch.cat([there, others], dim=2)
    output = attention(queries, keys, values, seen=there[:, None], scale=scale)
    return cut.join(output)


def _by_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: int,
    window: int,
    causal: bool,
    seen: Tensor | None,
    shared: tuple[Tensor, Tensor] | None,
    shared_seen: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Tokens that are congruent modulo the dilation as sequences of their own."""
    T = q.shape[1]
    if step > 1:
        seen = q.new_ones(q.shape[:2], dtype=torch.bool) if seen is None else seen
        q, k, v, seen = (flex.strided(x, step) for x in (q, k, v, seen))
        if shared is not None:
            shared = _repeat(shared[0], step), _repeat(shared[1], step)
        shared_seen = None if shared_seen is None else _repeat(shared_seen, step)
    output = flex.windows(
        q, k, v, window=window, causal=causal, seen=seen, shared=shared, shared_seen=shared_seen,
        scale=scale,
    )  # fmt: skip
    return flex.together(output, step, T) if step > 1 else output


def _repeat(x: Tensor, copies: int) -> Tensor:
    """[B, …] to [B · copies, …]."""
    return x[:, None].expand(-1, copies, *x.shape[1:]).flatten(0, 1)


class _Cut:
    """How [B, T, H, …] is cut into chunks of C tokens: [B · d · n, H, C, …], residues modulo the
    dilation d first, then n chunks of each."""

    def __init__(
        self, batch: int, length: int, residues: int, size: int, number: int, back: int, ahead: int
    ) -> None:
        self.batch, self.length, self.residues, self.size = batch, length, residues, size
        self.number, self.back, self.ahead = number, back, ahead

    @property
    def copies(self) -> int:
        """Chunks of one sequence."""
        return self.residues * self.number

    def _rows(self, x: Tensor, before: int, after: int) -> Tensor:
        """[B, T, H, …] to [B, d, before + n C + after, H, …], zeros where no token is."""
        each = self.number * self.size
        rest = (0, 0) * (x.dim() - 2)
        x = torch.nn.functional.pad(x, (*rest, 0, self.residues * each - self.length))
        x = torch.unflatten(x, 1, (each, self.residues)).movedim(2, 1)
        return torch.nn.functional.pad(x, (*rest, before, after)) if before or after else x

    def chunks(self, x: Tensor) -> Tensor:
        """[B · d · n, H, C, …]."""
        x = torch.unflatten(self._rows(x, 0, 0), 2, (self.number, self.size))
        return x.flatten(0, 2).movedim(2, 1)

    def windows(self, x: Tensor) -> Tensor:
        """The tokens of chunks and of the windows around them, [B · d · n, H, W, …] with
        W = back + C + ahead."""
        wide = self.back + self.size + self.ahead
        x = self._rows(x, self.back, self.ahead).unfold(2, wide, self.size)
        x = x.movedim(-1, 3)  # [B, d, n, wide, H, …]
        return x.flatten(0, 2).movedim(2, 1)

    def band(self, device: torch.device) -> Tensor:
        """[C, back + C + ahead]: which of these a token's window holds."""
        i = torch.arange(self.size, device=device)[:, None]
        j = torch.arange(self.back + self.size + self.ahead, device=device)[None, :]
        return (j >= i) & (j <= i + self.back + self.ahead)

    def join(self, x: Tensor) -> Tensor:
        """[B · d · n, H, C, …] to [B, T, H, …]."""
        x = torch.unflatten(x.movedim(1, 2), 0, (self.batch, self.residues, self.number)).flatten(
            2, 3
        )
        return x.movedim(1, 2).flatten(1, 2)[:, : self.length]
