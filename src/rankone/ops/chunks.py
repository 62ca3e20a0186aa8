"""Sequences cut into chunks of equal length, packed ones too, without looking at any value.

A tensor [B, T, H, …] becomes [n, P, C, …]: n chunks of C tokens, for each of P = B·H pairs of a
sequence and a head. Places beyond the end of a sequence are zeros, which leave a state as it is
(k = v = beta = decay = 0). Packed sequences each begin with a new chunk; as many chunks are made as
could be needed, and those that are not are zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Step = Callable[[int, Tensor], None]
"""Takes a chunk's number and the state on one side of it, and makes that on the other side of it,
in place."""

SEGMENT = 512
"""Tokens in a segment."""


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


class Chunks(NamedTuple):
    """How [B, T, …] lies in chunks of C tokens."""

    length: int
    size: int
    number: int
    packing: Packing | None

    @classmethod
    def of(cls, length: int, cu_seqlens: Tensor | None, size: int) -> Chunks:
        """The chunks of a batch of sequences, or of packed ones."""
        number = int(count(length, cu_seqlens, size))
        packing = None if cu_seqlens is None else _pack(cu_seqlens.long(), length, size, number)
        return cls(length, size, number, packing)

    def segments(self) -> list[Segment]:
        """All chunks, `SEGMENT` tokens at a time."""
        most = SEGMENT // self.size
        return [
            Segment(self, first, min(first + most, self.number))
            for first in range(0, self.number, most)
        ]

    def room(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A place for the tokens of all chunks, [B, N·C, H, …], for a tensor [B, T, H, …]."""
        batch, _, *rest = like.shape
        return like.new_empty(batch, self.number * self.size, *rest, dtype=dtype)

    def join(self, room: Tensor) -> Tensor:
        """[B, T, H, …], once every segment has put its tokens into the room for them."""
        if self.packing is None:
            return room[:, : self.length].contiguous()
        return room[:, self.packing.place]

    def begin(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """What a scan starts with and may change: the state [P, K, V], and a place for the states
        at the other end [S, H, K, V], which are the same for sequences without a token."""
        if self.packing is None:
            return states.flatten(0, 1).clone(), states
        return torch.zeros_like(states[0]), states.clone()

    def end(self, state: Tensor, others: Tensor) -> Tensor:
        """The states at the other end, after a scan."""
        return state.view(others.shape) if self.packing is None else others


class Segment(NamedTuple):
    """Chunks that are worked on together: few enough that what is made of them stays in cache."""

    chunks: Chunks
    first: int
    last: int

    def split(
        self,
        x: Tensor,
        dtype: torch.dtype,
        *,
        times: Tensor | float | None = None,
        across: bool = False,
    ) -> Tensor:
        """[B, T, H, …] to [n, P, C, …], times a number or a factor [B, T, H, 1] in the same pass.

        With `across` the tokens of [B, T, H, K] become columns, [n, P, K, C].
        """
        x = self._places(x).to(dtype)
        factor = self._places(times) if isinstance(times, Tensor) else times
        if across:
            x = x.mT
            factor = factor.mT if isinstance(factor, Tensor) else factor
        found = x.new_empty(x.shape)
        if factor is None:
            found.copy_(x)
        else:
            torch.mul(x, factor, out=found)
        return found.flatten(1, 2)

    def put(self, x: Tensor, room: Tensor, times: float = 1.0) -> None:
        """[n, P, C, …] into the room for all tokens, times a number."""
        place = self._chunked(room[:, self.first * self.chunks.size : self.last * self.chunks.size])
        torch.mul(x.view(place.shape), times, out=place)

    def states(self, state: Tensor) -> Tensor:
        """A place for a state of every chunk, [n, P, K, V]."""
        return state.new_empty(self.last - self.first, *state.shape)

    def forward_scan(
        self, state: Tensor, initial: Tensor, final: Tensor | None, step: Step
    ) -> None:
        """From the state before the segment to that after it, in place; final ones are put where
        they belong, if there is a place for them.

        `step(n, state)` does so for the segment's chunk n.
        """
        numbers = range(self.last - self.first)
        packing = self.chunks.packing
        for n in numbers:
            if packing is not None:
                _take(state, initial, packing, self.first + n, packing.first)
            step(n, state)
            if packing is not None and final is not None:
                _leave(state, final, packing, self.first + n, packing.last)

    def backward_scan(
        self, grad: Tensor, grad_final: Tensor, grad_initial: Tensor, step: Step
    ) -> None:
        """From the gradient of the state after the segment to that before it, likewise."""
        numbers = range(self.last - self.first)
        packing = self.chunks.packing
        for n in reversed(numbers):
            if packing is not None:
                _take(grad, grad_final, packing, self.first + n, packing.last)
            step(n, grad)
            if packing is not None:
                _leave(grad, grad_initial, packing, self.first + n, packing.first)

    def _places(self, x: Tensor) -> Tensor:
        """[B, T, H, …] to [n, B, H, C, …], seen in place where that can be."""
        number, size, packing = self.last - self.first, self.chunks.size, self.chunks.packing
        if packing is not None:
            part = slice(self.first, self.last)
            inside = packing.inside[part].view(1, number * size, *[1] * (x.dim() - 2))
            return self._chunked(torch.where(inside, x[:, packing.token[part].flatten()], 0))
        x = x[:, self.first * size : self.last * size]
        missing = number * size - x.shape[1]
        if missing:
            x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1)
        return self._chunked(x)

    def _chunked(self, x: Tensor) -> Tensor:
        """[B, n·C, H, …] seen as [n, B, H, C, …]."""
        rows = x.view(x.shape[0], -1, self.chunks.size, *x.shape[2:])
        return rows.movedim((1, 0, 3, 2), (0, 1, 2, 3))


def count(length: int | torch.SymInt, cu_seqlens: Tensor | None, size: int) -> int | torch.SymInt:
    """Chunks of a batch of sequences, or the most that packed ones could need."""
    return -(-length // size) if cu_seqlens is None else length // size + cu_seqlens.shape[0] - 1


def _take(state: Tensor, states: Tensor, packing: Packing, at: int, here: Tensor) -> None:
    """The state becomes that of chunk `at`'s sequence, if the walk enters that sequence `here`."""
    own = packing.sequence[at : at + 1]
    state.copy_(torch.where(here[at], states.index_select(0, own)[0], state))


def _leave(state: Tensor, states: Tensor, packing: Packing, at: int, here: Tensor) -> None:
    """The state is put where that of chunk `at`'s sequence is, if the walk leaves it `here`."""
    own = packing.sequence[at : at + 1]
    states.index_copy_(0, own, torch.where(here[at], state, states.index_select(0, own)[0])[None])


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
    )
