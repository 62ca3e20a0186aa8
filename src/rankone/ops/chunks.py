"""Sequences cut into chunks of equal length, packed ones too, without looking at any value.

A tensor [B, T, H, …] becomes [B, H, N, C, …]. Places beyond the end of a sequence are zeros, which
leave a state as it is (k = v = beta = decay = 0). Packed sequences each begin with a new chunk; as
many chunks are made as could be needed, and those that are not are zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Scan = Callable[[int, Tensor], Tensor]
"""The number of a chunk and the state on one side of it → the state on the other side."""


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
    """How [B, T, …] lies in N chunks of C tokens."""

    length: int
    size: int
    number: int
    packing: Packing | None

    @classmethod
    def of(cls, length: int, size: int, cu_seqlens: Tensor | None) -> Chunks:
        """The chunks of a batch of sequences, or of packed ones."""
        if cu_seqlens is None:
            return cls(length, size, -(-length // size), None)
        count = length // size + len(cu_seqlens) - 1
        return cls(length, size, count, _pack(cu_seqlens.long(), length, size, count))

    def split(self, x: Tensor) -> Tensor:
        """[B, T, H, …] to [B, H, N, C, …]."""
        if self.packing is None:
            missing = self.number * self.size - self.length
            if missing:
                x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1)
            x = x.reshape(x.shape[0], self.number, self.size, *x.shape[2:])
        else:
            inside = self.packing.inside.view(1, self.number, self.size, *[1] * (x.dim() - 2))
            x = torch.where(inside, x[:, self.packing.token], 0)
        return x.movedim(3, 1)

    def join(self, x: Tensor) -> Tensor:
        """[B, H, N, C, …] to [B, T, H, …]."""
        x = x.movedim(1, 3).flatten(1, 2)
        if self.packing is None:
            return x[:, : self.length].contiguous()
        return x[:, self.packing.place]


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


def forward_scan(chunks: Chunks, initial: Tensor, steps: Scan) -> tuple[Tensor, Tensor]:
    """The state before every chunk [B, H, N, K, V], and the states at the end [S, H, K, V].

    `steps(n, state)` is the state after chunk n. `initial` is [S, H, K, V], S = B unless packed.
    """
    packing = chunks.packing
    state = initial if packing is None else torch.zeros_like(initial[:1])
    before, after = [], []
    for n in range(chunks.number):
        if packing is not None:
            start = initial.index_select(0, packing.sequence[n : n + 1])
            state = torch.where(packing.first[n], start, state)
        before.append(state)
        state = steps(n, state)
        if packing is not None:
            after.append(state)
    states = torch.stack(before, dim=2)
    if packing is None:
        return states, state
    last = torch.cat(after)[packing.end]
    return states, torch.where(packing.empty[:, None, None, None], initial, last)


def backward_scan(chunks: Chunks, final: Tensor, steps: Scan) -> tuple[Tensor, Tensor]:
    """The gradient of the state after every chunk [B, H, N, K, V], and of the initial states.

    `steps(n, grad)` is the gradient before chunk n, given the one after it. `final` is the
    gradient of the states at the end.
    """
    packing = chunks.packing
    grad = final if packing is None else torch.zeros_like(final[:1])
    after, before = [], []
    for n in reversed(range(chunks.number)):
        if packing is not None:
            end = final.index_select(0, packing.sequence[n : n + 1])
            grad = torch.where(packing.last[n], end, grad)
        after.append(grad)
        grad = steps(n, grad)
        if packing is not None:
            before.append(grad)
    grads = torch.stack(after[::-1], dim=2)
    if packing is None:
        return grads, grad
    first = torch.cat(before[::-1])[packing.begin]
    return grads, torch.where(packing.empty[:, None, None, None], final, first)
