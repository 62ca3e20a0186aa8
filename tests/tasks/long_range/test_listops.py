"""Trees, and what they come to by a second reader of their words."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from typing import NamedTuple

import jaxtyping
import pytest
import torch

from rankone.tasks.long_range.listops import SMALL, VOCABULARY, Trees, grow, listops, spell

RULES = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: int(statistics.median(values)),
    "SM": lambda values: sum(values) % 10,
}
OPENINGS = [f"[{name}" for name in RULES]


class Read(NamedTuple):
    """What a tree comes to, its deepest node, and how many arguments its operators have."""

    value: int
    depth: int
    arguments: list[int]


def read(words: list[str]) -> Read:
    lists, depth, arguments = [[]], 1, []
    for word in words:
        depth = max(depth, len(lists))
        if word in OPENINGS:
            lists.append([word[1:]])
        elif word == "]":
            name, *values = lists.pop()
            arguments.append(len(values))
            lists[-1].append(RULES[name](values))
        else:
            assert len(word) == 1
            lists[-1].append(int(word))
    ((value,),) = lists
    return Read(value, depth, arguments)


def words_of(row: torch.Tensor) -> list[str]:
    return spell(bytes(row.tolist())).split()


class Scripted(random.Random):
    """Draws what makes one tree, given by its words."""

    def __init__(self, words: list[str]) -> None:
        super().__init__(0)
        self.coins = [0.2 if word in OPENINGS else 0.3 for word in words if word != "]"]
        self.digits = [int(word) for word in words if word.isdigit()]
        self.operators = [OPENINGS.index(word) for word in words if word in OPENINGS]
        self.counts: list[int] = []
        nested: list[int] = []
        for word in words:
            if word == "]":
                nested.pop()
                continue
            if nested:
                self.counts[nested[-1]] += 1
            if word in OPENINGS:
                nested.append(len(self.counts))
                self.counts.append(0)

    def random(self):
        return self.coins.pop(0)

    def randint(self, low, high):
        assert low <= self.counts[0] <= high
        return self.counts.pop(0)

    def randrange(self, stop):
        return {4: self.operators, 10: self.digits}[stop].pop(0)


def _many(trees=None, seed=0):
    """A thousand trees, without the checks of annotations, which take more than they do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        return listops((800, 100, 100), trees=trees, seed=seed)


@pytest.fixture(scope="module")
def drawn():
    return _many()


@pytest.fixture(scope="module")
def small():
    return _many(SMALL)


def _rows(splits):
    return [row for part in splits for row in part.tokens]


def _labels(splits):
    return torch.cat([part.labels for part in splits])


@pytest.mark.parametrize(
    ("tree", "value"),
    [
        ("7", 7),
        ("[MIN 3 1 2 ]", 1),
        ("[MAX 3 1 2 ]", 3),
        ("[MED 9 0 4 ]", 4),
        ("[MED 1 2 ]", 1),
        ("[MED 9 0 8 1 ]", 4),
        ("[MED 9 0 8 2 ]", 5),
        ("[MED 9 9 ]", 9),
        ("[SM 4 6 ]", 0),
        ("[SM 9 9 9 ]", 7),
        ("[SM 9 9 9 9 9 9 9 9 9 9 ]", 0),
        ("[MIN [MAX 2 8 ] [SM 9 [MED 3 6 ] ] 5 ]", 3),
        ("[SM [SM [SM 5 6 ] [MAX 0 9 ] ] [MED 0 1 ] 7 ]", 7),
    ],
)
def test_trees_come_to_what_they_come_to_by_hand(tree, value):
    words, tokens = tree.split(), []
    assert grow(Scripted(words), Trees(), tokens) == value
    assert spell(bytes(tokens)) == tree
    assert read(words).value == value


@pytest.mark.parametrize("name", ["drawn", "small"])
def test_labels_are_what_a_second_reader_finds(name, request):
    splits = request.getfixturevalue(name)
    found = [read(words_of(row)).value for row in _rows(splits)]
    assert found == _labels(splits).tolist()


@pytest.mark.parametrize(("name", "trees"), [("drawn", Trees()), ("small", SMALL)])
def test_trees_keep_within_their_bounds(name, trees, request):
    rows = _rows(request.getfixturevalue(name))
    reads = [read(words_of(row)) for row in rows]
    assert max(found.depth for found in reads) == trees.depth
    arguments = Counter(count for found in reads for count in found.arguments)
    assert sorted(arguments) == list(range(2, trees.arguments + 1))
    lengths = [int((row != 0).sum()) for row in rows]
    assert trees.longer_than < min(lengths) < 1.2 * trees.longer_than
    assert max(lengths) < trees.shorter_than


def test_bounds_are_not_themselves_among_the_lengths():
    lengths = listops((60, 1, 1), trees=Trees(depth=3, longer_than=6, shorter_than=8))[0].lengths
    assert lengths.unique().tolist() == [7]


def test_the_task_is_the_arenas():
    assert Trees() == Trees(depth=10, arguments=10, longer_than=500, shorter_than=2000)


def test_tokens_are_followed_by_padding_up_to_the_longest_that_can_be(drawn, small):
    assert drawn.train.tokens.shape == (800, 2000)
    assert small.test.tokens.shape == (100, 200)
    for splits in (drawn, small):
        tokens = torch.cat([part.tokens for part in splits])
        there = tokens != 0
        assert torch.equal(there.sum(1), there.long().cumprod(1).sum(1))
        assert tokens[there].unique().tolist() == list(range(1, VOCABULARY))


def test_a_node_is_an_operator_once_in_four_and_all_its_parts_are_as_likely():
    rng, firsts, counts, digits = random.Random(0), Counter(), Counter(), Counter()
    for _ in range(20_000):
        tokens: list[int] = []
        grow(rng, Trees(depth=2), tokens)
        first, *others = spell(bytes(tokens)).split()
        if first in OPENINGS:
            firsts[first] += 1
            counts[len(others) - 1] += 1
            digits.update(others[:-1])
        else:
            digits[first] += 1
    assert firsts.total() / 20_000 == pytest.approx(0.25, abs=0.015)
    for found, kinds in ((firsts, OPENINGS), (counts, range(2, 11)), (digits, "0123456789")):
        assert set(found) == set(kinds)
        for kind in kinds:
            assert found[kind] / found.total() == pytest.approx(1 / len(found), rel=0.15)


def test_nought_and_nine_are_the_most_frequent_answers(drawn):
    labels = _labels(drawn)
    shares = labels.bincount(minlength=10) / len(labels)
    assert set(shares.topk(2).indices.tolist()) == {0, 9}
    assert shares[[0, 9]].tolist() == pytest.approx([0.17, 0.17], abs=0.04)
    assert bool((shares[1:9] > 0.05).all())
    assert bool((shares[1:9] < 0.12).all())


def test_trees_are_as_long_as_the_arenas(drawn):
    lengths = torch.cat([part.lengths for part in drawn]).float()
    assert float(lengths.mean()) == pytest.approx(1050, abs=60)
    assert float(lengths.max()) > 1900


def test_a_seed_gives_the_same_trees_and_another_seed_others(small):
    again, other = (_many(SMALL, seed) for seed in (0, 1))
    for one, same in zip(small, again, strict=True):
        assert torch.equal(one.tokens, same.tokens)
        assert torch.equal(one.labels, same.labels)
    ours, theirs = ({bytes(row.tolist()) for row in _rows(splits)} for splits in (small, other))
    assert not ours & theirs


def test_no_tree_comes_twice_even_if_all_are_needed():
    """Two digits under an operator: there are 400."""
    trees = Trees(depth=2, arguments=2, longer_than=3, shorter_than=5)
    splits = listops((200, 120, 80), trees=trees)
    assert [len(part.labels) for part in splits] == [200, 120, 80]
    assert len({bytes(row.tolist()) for row in _rows(splits)}) == 400
