"""Bytes of text in two classes: made-up reviews, or the source of Python's own library.

The Long Range Arena classifies reviews of films, which cannot be shipped. `reviews` makes texts
with the same demand: words far apart have to be counted, and some of them turn others round.
`sources` are windows of real text, of which one tells tests from what they test.
"""

from __future__ import annotations

import itertools
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from rankone.tasks.long_range.examples import Splits, padded, split

VOCABULARY = 256
"""Padding, and bytes one more than themselves; 254 and 255 are one."""
_POLAR, _NEUTRAL, _NEGATORS = 150, 2000, ("not", "never", "hardly")
Sizes = tuple[int, int, int]


def encode(text: bytes) -> bytes:
    """Bytes as tokens: one more each, so that 0 is left for padding."""
    return bytes(min(byte, 254) + 1 for byte in text)


def words(count: int, rng: random.Random) -> list[str]:
    """Different words that nobody has read, of two to four syllables."""
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = range(rng.randint(2, 4))
        word = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in syllables)
        found[word] = None
    return list(found)


class _Language:
    """Positive, negative and neutral words, the same for all texts of a seed."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        all_words = words(2 * _POLAR + _NEUTRAL, rng)
        self.polar = {1: all_words[:_POLAR], -1: all_words[_POLAR : 2 * _POLAR]}
        self.neutral = all_words[2 * _POLAR :]
        weights = [1 / (rank + 1) for rank in range(_NEUTRAL)]
        self.cumulative = list(itertools.accumulate(weights))

    def sentence(self, rng: random.Random) -> tuple[str, int]:
        """Some words and what they weigh: a polar word, turned round by a negator up to three words
        before it, and twice as much after a "but"."""
        text = rng.choices(self.neutral, cum_weights=self.cumulative, k=rng.randint(4, 20))
        score = 0
        if rng.random() < 0.3:
            score += self._insert(text, rng)
        if rng.random() < 0.1:
            clause = rng.choices(self.neutral, cum_weights=self.cumulative, k=rng.randint(3, 8))
            score += 2 * self._insert(clause, rng)
            text += ["but", *clause]
        return " ".join(text) + ".", score

    def _insert(self, text: list[str], rng: random.Random) -> int:
        sign, place = rng.choice((1, -1)), rng.randrange(len(text))
        text[place] = rng.choice(self.polar[sign])
        if rng.random() < 0.3:
            text.insert(max(0, place - rng.randrange(3)), rng.choice(_NEGATORS))
            return -sign
        return sign


def review(language: _Language, rng: random.Random, longest: int) -> tuple[str, int]:
    """A text of an eighth of the longest length to all of it, and whether it weighs more than 0."""
    while True:
        length, text, total = rng.randint(longest // 8, longest), "", 0
        while True:
            sentence, score = language.sentence(rng)
            if len(text) + len(sentence) + 1 > length:
                break
            text, total = f"{text} {sentence}".strip(), total + score
        if text and total:
            return text, int(total > 0)


def reviews(sizes: Sizes = (20_000, 2_000, 2_000), *, longest: int = 4000, seed: int = 0) -> Splits:
    """Texts whose class is the sign of what their words weigh."""
    language, rng = _Language(seed), random.Random(seed + 1)
    return _splits([review(language, rng, longest) for _ in range(sum(sizes))], sizes, longest)


def sources(sizes: Sizes = (20_000, 2_000, 2_000), *, longest: int = 4000, seed: int = 0) -> Splits:
    """Windows of the Python library's own source: does a test hold them?

    Files are split, not windows: no file is in two splits. The two classes are as many.
    """
    rng = random.Random(seed)
    files: dict[int, list[bytes]] = {0: [], 1: []}
    for path, content in library():
        if len(content) >= longest // 2:
            files[int(_is_test(path))].append(content)
    examples: list[tuple[str, int]] = []
    taken = {label: _shares(found, sizes, rng) for label, found in files.items()}
    for part, size in enumerate(sizes):
        for n in range(size):
            label = n % 2
            content = rng.choice(taken[label][part])
            first = rng.randrange(max(1, len(content) - longest + 1))
            window = content[first : first + longest]
            examples.append((window.decode("latin-1"), label))
    return _splits(examples, sizes, longest)


def library() -> Iterator[tuple[Path, bytes]]:
    """The Python files of the standard library, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts and "__pycache__" not in path.parts:
            yield path.relative_to(root), path.read_bytes()


def _is_test(path: Path) -> bool:
    return any(part in ("test", "tests", "idle_test") for part in path.parts)


def _shares(files: list[bytes], sizes: Sizes, rng: random.Random) -> list[list[bytes]]:
    """Files for each split, in proportion, and one at least."""
    if len(files) < 3:
        raise ValueError(
            "this Python's library has too few source files for text to be made of them; "
            "take the data 'reviews'"
        )
    rng.shuffle(files)
    most = (len(files) - 1) // 2
    held, last = (min(max(1, round(len(files) * n / sum(sizes))), most) for n in sizes[1:])
    return [files[held + last :], files[:held], files[held : held + last]]


def _splits(examples: list[tuple[str, int]], sizes: Sizes, longest: int) -> Splits:
    rows = padded([encode(text.encode("latin-1")) for text, _ in examples], longest)
    return split(rows, torch.tensor([label for _, label in examples]), sizes)
