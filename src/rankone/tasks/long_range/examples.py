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

    def orders(self, size: int, generator: Generator, *, grouped: int = 1) -> Iterator[Tensor]:
        """Which examples are in each batch, without end: none twice before all whole batches came.

        So many batches as `grouped` says share their examples out by length, for less padding.
        """
        size = min(size, len(self.labels))
        lengths = self.lengths
        while True:
            order = torch.randperm(len(self.labels), generator=generator)
            order = order[: len(order) // size * size]
            for pool in torch.split(order, size * grouped):
                by_length = pool[lengths[pool].argsort(stable=True)] if grouped > 1 else pool
                batches = torch.split(by_length, size)
                for n in torch.randperm(len(batches), generator=generator).tolist():
                    yield batches[n]

    def in_order(self, size: int) -> Iterator[Batch]:
        """Batches of all examples, once, the shortest first."""
        for which in torch.split(self.lengths.argsort(stable=True), size):
            yield self.take(which)

    @property
    def lengths(self) -> Int[Tensor, " N"]:
        """Tokens of each example, of pairs those of both."""
        return (self.tokens != PADDING).flatten(1).sum(1)

    @property
    def majority(self) -> float:
        """The accuracy of always answering the most frequent label."""
        return float(self.labels.bincount().max() / len(self.labels))


class Splits(NamedTuple):
    """Examples to learn from, to watch and to be judged by."""

    train: Examples
    validation: Examples
    test: Examples

    @property
    def by_first_token(self) -> float:
        """The accuracy of the most frequent label of those that begin with the same token, of pairs
        whose first sequences do."""
        (seen, labels), (first, truth) = (
            (part.tokens.flatten(1)[:, 0].long(), part.labels) for part in (self.train, self.test)
        )
        count = torch.zeros(256, int(max(labels.max(), truth.max())) + 1, dtype=torch.long)
        count.index_put_((seen, labels), torch.ones_like(labels), accumulate=True)
        return float((count.argmax(1)[first] == truth).double().mean())


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
