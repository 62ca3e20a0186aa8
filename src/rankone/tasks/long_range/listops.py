"""ListOps: nested lists of digits under MIN, MAX, MED and SM, and what they come to.

Trees are drawn as the Long Range Arena draws them (Tay et al. 2021, after Nangia and Bowman 2018):
a node is an operator with probability 1/4 unless it is at the largest depth, an operator has two to
ten arguments, and trees are kept whose length is between the bounds, once each. The most frequent
answer is right for 17 % of them, the most frequent one for a list's first operator for 35 %.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rankone.tasks.long_range.examples import Splits, padded, split

OPERATORS = ("MIN", "MAX", "MED", "SM")
VOCABULARY = 16
"""Padding, ten digits from 1 on, four operators that open a list, and the bracket that closes."""
_FIRST_OPERATOR, _CLOSE = 11, 15
_OPERATOR = 0.25


@dataclass(frozen=True)
class Trees:
    """Which trees are drawn."""

    depth: int = 10
    """Of the deepest node; the root is at 1."""
    arguments: int = 10
    """The most of an operator; it has two at least."""
    longer_than: int = 500
    shorter_than: int = 2000
    """Tokens: one a digit, two an operator."""


SMALL = Trees(depth=6, arguments=5, longer_than=30, shorter_than=200)
"""A look, not the task."""


def median(values: list[int]) -> int:
    """The middle value, or the mean of the two middle ones without its fraction.

    >>> median([9, 1, 4]), median([1, 2])
    (4, 1)
    """
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) // 2


_VALUES: tuple[Callable[[list[int]], int], ...] = (min, max, median, lambda x: sum(x) % 10)


def grow(rng: random.Random, trees: Trees, tokens: list[int], depth: int = 1) -> int:
    """Draws a tree, appends its tokens, and returns its value.

    A tree that has become too long is not drawn to its end; its value is -1 then.
    """
    if depth >= trees.depth or rng.random() >= _OPERATOR:
        digit = rng.randrange(10)
        tokens.append(1 + digit)
        return digit
    count, operator = rng.randint(2, trees.arguments), rng.randrange(len(OPERATORS))
    tokens.append(_FIRST_OPERATOR + operator)
    values = []
    for _ in range(count):
        values.append(grow(rng, trees, tokens, depth + 1))
        if len(tokens) >= trees.shorter_than:
            return -1
    tokens.append(_CLOSE)
    return _VALUES[operator](values)


def spell(tokens: bytes) -> str:
    """What tokens stand for.

    >>> spell(bytes([13, 3, 10, 15]))
    '[MED 2 9 ]'
    """
    names = ["", *map(str, range(10)), *(f"[{name}" for name in OPERATORS), "]"]
    return " ".join(names[token] for token in tokens if token)


def listops(
    sizes: tuple[int, int, int] = (96_000, 2_000, 2_000),
    *,
    trees: Trees | None = None,
    seed: int = 0,
) -> Splits:
    """The three splits; no tree is in two of them.

    >>> splits = listops((3, 1, 1))
    >>> spell(bytes(splits.test.tokens[0].tolist()))[:40]
    '[MAX 2 3 7 4 [MAX 9 5 ] 9 7 [MED [SM [MI'
    """
    trees = trees or Trees()
    rng = random.Random(seed)
    found: dict[bytes, int] = {}
    while len(found) < sum(sizes):
        tokens: list[int] = []
        value = grow(rng, trees, tokens)
        if trees.longer_than < len(tokens) < trees.shorter_than:
            found.setdefault(bytes(tokens), value)
    rows = padded(list(found), trees.shorter_than)
    return split(rows, torch.tensor(list(found.values())), sizes)
