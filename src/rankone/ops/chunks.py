"""Sequences cut into chunks of equal length, packed ones too, without looking at any value.

A tensor [B, T, H, …] becomes [B, H, N, C, …], a segment of some chunks at a time. Places beyond
the end of a sequence are zeros, which leave a state as it is (k = v = beta = decay = 0). Packed
sequences each begin with a new chunk; as many chunks are made as could be needed, and those that
are not are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Step = Callable[[int, Tensor], Tensor]
"""The number of a chunk and the state on one side of it → the state on the other side."""

CHUNK = 64
"""Tokens in a chunk."""
SEGMENT = 16
"""Chunks in a segment."""


class Packing(NamedTuple):
    """Where the chunks of packed sequences are; N chunks, S sequences."""

    token: Tensor
    """[N, C]: which token is at each place."""
    inside: Tensor
    """[N, C]: whether a token is there."""
    place: Tensor
    """[T]: the place of each token among the N·C."""
    sequence: Tensor
    """[N]: the sequence of each chunk."""
    first: Tensor
    """[N]: whether it is its sequence's first."""
    last: Tensor
    """[N]: whether it is its sequence's last."""
    begin: Tensor
    """[S]: the first chunk of each sequence; that of another one if it is empty."""
    end: Tensor
    """[S]: the last chunk of each sequence; that of another one if it is empty."""
    empty: Tensor
    """[S]: whether a sequence has no token."""


class Chunks(NamedTuple):
    """How [B, T, …] lies in chunks of C tokens."""

    length: int
    size: int
    number: int
    packing: Packing | None

    @classmethod
    def of(cls, length: int, cu_seqlens: Tensor | None, size: int = CHUNK) -> Chunks:
        """The chunks of a batch of sequences, or of packed ones."""
        if cu_seqlens is None:
            return cls(length, size, -(-length // size), None)
        number = length // size + len(cu_seqlens) - 1
        return cls(length, size, number, _pack(cu_seqlens.long(), length, size, number))

    def segments(self) -> list[Segment]:
        """All chunks, `SEGMENT` at a time."""
        return [
            Segment(self, first, min(first + SEGMENT, self.number))
            for first in range(0, self.number, SEGMENT)
        ]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """[B, H, n, C, …] of all segments to [B, T, H, …]."""
        x = torch.cat([part.movedim(1, 3).flatten(1, 2) for part in parts], dim=1)
        if self.packing is None:
            return x[:, : self.length].contiguous() if x.shape[1] > self.length else x
        return x[:, self.packing.place]

    def begin(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """What a scan starts with: the state [B, H, K, V], and a place for the states at the
        other end [S, H, K, V]."""
        if self.packing is None:
            return states, states
        return torch.zeros_like(states[:1]), states

    def end(self, state: Tensor, others: Tensor) -> Tensor:
        """The states at the other end, after a scan; never one of its arguments itself."""
        return (state if self.packing is None else others).clone()


class Segment(NamedTuple):
    """Chunks that are worked on together: few enough that what is made of them stays in cache."""

    chunks: Chunks
    first: int
    last: int

    def split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, H, …] to [B, H, n, C, …]."""
        number, size, packing = self.last - self.first, self.chunks.size, self.chunks.packing
        if packing is None:
            x = x[:, self.first * size : self.last * size].to(dtype)
            missing = number * size - x.shape[1]
            if missing:
                x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1)
            x = x.reshape(x.shape[0], number, size, *x.shape[2:])
        else:
            part = slice(self.first, self.last)
            inside = packing.inside[part].view(1, number, size, *[1] * (x.dim() - 2))
            x = torch.where(inside, x[:, packing.token[part]], 0).to(dtype)
        return x.movedim(3, 1).contiguous()

    def forward_scan(
        self, state: Tensor, initial: Tensor, final: Tensor, step: Step
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The states before all chunks [B, H, n, K, V], the one after them, and the final ones.

        `step(n, state)` is the state after the segment's chunk n.
        """
        packing = self.chunks.packing
        before, after = [], []
        for n in range(self.last - self.first):
            if packing is not None:
                at = self.first + n
                start = initial.index_select(0, packing.sequence[at : at + 1])
                state = torch.where(packing.first[at], start, state)
            before.append(state)
            state = step(n, state)
            after.append(state)
        if packing is not None:
            final = self._gather(after, packing.end, packing.empty, final)
        return torch.stack(before, dim=2), state, final

    def backward_scan(
        self, grad: Tensor, grad_final: Tensor, grad_initial: Tensor, step: Step
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients after all chunks [B, H, n, K, V], the one before them, and the initial.

        `step(n, grad)` is the gradient before the segment's chunk n, given that after it.
        """
        packing = self.chunks.packing
        before, after = [], []
        for n in reversed(range(self.last - self.first)):
            if packing is not None:
                at = self.first + n
                end = grad_final.index_select(0, packing.sequence[at : at + 1])
                grad = torch.where(packing.last[at], end, grad)
            after.append(grad)
            grad = step(n, grad)
            before.append(grad)
        if packing is not None:
            grad_initial = self._gather(before[::-1], packing.begin, packing.empty, grad_initial)
        return torch.stack(after[::-1], dim=2), grad, grad_initial

    def _gather(self, found: list[Tensor], at: Tensor, empty: Tensor, others: Tensor) -> Tensor:
        """`others` [S, H, K, V] with the sequences whose chunk `at` is in this segment replaced."""
        here = (at >= self.first) & (at < self.last) & ~empty
        place = (at - self.first).clamp(0, self.last - self.first - 1)
        return torch.where(here[:, None, None, None], torch.cat(found)[place], others)


def _pack(offsets: Tensor, length: int, size: int, count: int) -> Packing:
    device = offsets.device
    chunks = (offsets.diff() + size - 1) // size
    after = chunks.cumsum(0)
    number = torch.arange(count, device=device)
    found = torch.searchsorted(after, number, right=True)
    used = found < len(chunks)
    sequence = found.clamp_max(len(chunks) - 1)
    within = number - (after - chunks)[sequence]
    token = (offsets[sequence] + within * size)[:, None] + torch.arange(size, device=device)
    inside = used[:, None] & (token < offsets[sequence + 1][:, None])
    tokens = torch.arange(length, device=device)
    owner = torch.searchsorted(offsets[1:], tokens, right=True)
    place = (after - chunks)[owner] * size + tokens - offsets[owner]
    return Packing(
        token.clamp(0, length - 1),
        inside,
        place,
        sequence,
        used & (within == 0),
        used & (within == chunks[sequence] - 1),
        (after - chunks).clamp_max(count - 1),
        (after - 1).clamp_min(0),
        chunks == 0,
    )
