"""Labelled sequences of small whole numbers, and how they come in batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Int, UInt8
from torch import Generator, Tensor

PADDING = 0
"""The token that no sequence holds."""


class Batch(NamedTuple):
    """Some examples, cut to the longest of them; of pairs there are two sequences each."""

    tokens: Int[Tensor, "B *P T"]
    labels: Int[Tensor, " B"]

    def to(self, device: torch.device) -> Batch:
        """On a device."""
        return Batch(self.tokens.to(device), self.labels.to(device))


class Examples(NamedTuple):
    """All examples of a split: tokens 1 to 255, 0 where no token is."""

    tokens: UInt8[Tensor, "N *P L"]
    labels: Int[Tensor, " N"]

    def take(self, which: Tensor) -> Batch:
        """Some of them."""
        tokens = self.tokens[which]
        longest = int((tokens != PADDING).flatten(0, -2).any(0).nonzero().max()) + 1
        return Batch(tokens[..., :longest].long(), self.labels[which])

    def orders(self, size: int, generator: Generator) -> Iterator[Tensor]:
        """Which examples are in each batch, without end: each once before any comes again."""
        size = min(size, len(self.labels))
        while True:
            order = torch.randperm(len(self.labels), generator=generator)
            for first in range(0, len(order) - size + 1, size):
                yield order[first : first + size]

    def in_order(self, size: int) -> Iterator[Batch]:
        """Batches of all examples, once."""
        for first in range(0, len(self.labels), size):
            yield self.take(torch.arange(first, min(first + size, len(self.labels))))

    @property
    def majority(self) -> float:
        """The accuracy of always answering the most frequent label."""
        return float(self.labels.bincount().max() / len(self.labels))


class Splits(NamedTuple):
    """Examples to learn from, to watch and to be judged by."""

    train: Examples
    validation: Examples
    test: Examples


def split(tokens: Tensor, labels: Tensor, sizes: tuple[int, int, int]) -> Splits:
    """Examples in their order, so many for each split."""
    bounds = (0, sizes[0], sizes[0] + sizes[1], sum(sizes))
    return Splits(*(Examples(tokens[a:b], labels[a:b]) for a, b in pairwise(bounds)))


def padded(sequences: list[bytes], length: int) -> UInt8[Tensor, "N L"]:
    """Sequences of tokens as rows of one tensor."""
    found = torch.zeros(len(sequences), length, dtype=torch.uint8)
    for row, sequence in zip(found, sequences, strict=True):
        row[: len(sequence)] = torch.frombuffer(bytearray(sequence), dtype=torch.uint8)
    return found
