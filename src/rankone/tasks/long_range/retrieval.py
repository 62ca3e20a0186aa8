"""Do two documents belong together? Each is read by the same model on its own.

The Long Range Arena asks whether one paper cites another, in texts that cannot be shipped. `topics`
are made-up documents that share a topic or a rare word, or neither; `halves` are two windows of one
file of the Python library's source, or of two files.
"""

from __future__ import annotations

import random

import torch

from rankone.tasks.long_range.examples import Splits, padded, split
from rankone.tasks.long_range.text import Sizes, encode, library, words

_TOPICS, _WORDS, _KEYS, _SHARED = 50, 20, 30, 0.5
Pair = tuple[str, str, int]
"""Two documents, and whether they belong together."""
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def _key(rng: random.Random) -> str:
    """One of a million words of eight letters."""
    number = rng.randrange(10**6)
    return "".join(_ALPHABET[(number // 26**n + 7 * n) % 26] for n in range(8))


class _Papers:
    """Topics, each with words of its own."""

    def __init__(self, seed: int) -> None:
        found = words(_TOPICS * _WORDS, random.Random(seed))
        self.topics = [found[n * _WORDS : (n + 1) * _WORDS] for n in range(_TOPICS)]

    def paper(self, rng: random.Random, topic: int, keys: list[str], longest: int) -> str:
        """Words of a topic and of others, with the keys here and there."""
        text: list[str] = []
        others = rng.sample(range(_TOPICS), 3)
        room = longest - sum(len(key) + 1 for key in keys)
        length = 0
        while True:
            own = topic if rng.random() < 0.5 else rng.choice(others)
            word = rng.choice(self.topics[own])
            if length + len(word) + 1 > room:
                break
            text.append(word)
            length += len(word) + 1
        for key in keys:
            text.insert(rng.randrange(len(text) + 1), key)
        return " ".join(text)

    def pair(self, rng: random.Random, longest: int) -> Pair:
        """Two papers and whether they belong together: by their topic, or by a key they share."""
        label = rng.randrange(2)
        keys = [[_key(rng) for _ in range(_KEYS)] for _ in range(2)]
        one, other = rng.sample(range(_TOPICS), 2)
        if label and rng.random() < _SHARED:
            other = one
        elif label:
            keys[1][0] = keys[0][0]
        if not label and set(keys[0]) & set(keys[1]):
            return self.pair(rng, longest)
        first, second = (
            self.paper(rng, topic, own, longest)
            for topic, own in zip((one, other), keys, strict=True)
        )
        return first, second, label


def topics(sizes: Sizes = (10_000, 1_000, 1_000), *, longest: int = 4000, seed: int = 0) -> Splits:
    """Made-up papers: half of the pairs share their topic or a rare word, the others neither."""
    papers, rng = _Papers(seed), random.Random(seed + 1)
    return _pairs([papers.pair(rng, longest) for _ in range(sum(sizes))], sizes, longest)


def halves(sizes: Sizes = (10_000, 1_000, 1_000), *, longest: int = 4000, seed: int = 0) -> Splits:
    """Two windows of one file of the Python library, which do not overlap, or of two files.

    No file is in two splits.
    """
    rng = random.Random(seed)
    files = [content for _, content in library() if len(content) >= 2 * longest]
    if len(files) < 12:
        raise ValueError(
            "this Python's library has too few long source files for pairs to be made of them; "
            "take the data 'topics'"
        )
    rng.shuffle(files)
    tenth = max(2, len(files) // 10)
    shares = [files[2 * tenth :], files[:tenth], files[tenth : 2 * tenth]]
    found: list[Pair] = []
    for share, size in zip(shares, sizes, strict=True):
        for n in range(size):
            one, other = rng.sample(share, 2)
            half = longest
            first = rng.randrange(len(one) // 2 - half + 1)
            source = one if n % 2 else other
            middle = len(source) // 2
            second = middle + rng.randrange(len(source) - middle - half + 1)
            texts = (one[first : first + half], source[second : second + half])
            here, there = (text.decode("latin-1") for text in texts)
            found.append((here, there, n % 2))
    return _pairs(found, sizes, longest)


def _pairs(found: list[Pair], sizes: Sizes, longest: int) -> Splits:
    rows = [
        padded([encode(text.encode("latin-1")) for text in texts], longest)
        for texts in ([first for first, _, _ in found], [second for _, second, _ in found])
    ]
    return split(torch.stack(rows, dim=1), torch.tensor([label for *_, label in found]), sizes)
