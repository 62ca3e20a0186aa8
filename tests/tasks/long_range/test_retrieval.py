"""Pairs that belong together, by a second reader of their words and of where they lie."""

from __future__ import annotations

import random
import string
from collections import Counter
from pathlib import Path

import pytest
import torch

from rankone.tasks.long_range import retrieval
from rankone.tasks.long_range.retrieval import halves, topics
from rankone.tasks.long_range.text import words

TOPICS, WORDS, KEYS = 50, 20, 30
LONGEST = 40


def _text(row):
    return bytes(token - 1 for token in row.tolist() if token).decode("latin-1")


def _pairs(splits):
    return [(_text(row[0]), _text(row[1])) for part in splits for row in part.tokens]


def _labels(splits):
    return torch.cat([part.labels for part in splits])


class Reader:
    """A paper's topic and its keys, by the words of a seed."""

    def __init__(self, seed):
        found = words(TOPICS * WORDS, random.Random(seed))
        self.topic_of = {word: n // WORDS for n, word in enumerate(found)}

    def topic(self, paper):
        counts = Counter(self.topic_of[w] for w in paper.split() if w in self.topic_of)
        return counts.most_common(1)[0][0]

    def keys(self, paper):
        return [word for word in paper.split() if word not in self.topic_of]


@pytest.fixture(scope="module")
def papers():
    return topics((120, 20, 20), longest=2000)


@pytest.mark.parametrize("seed", [0, 5])
def test_papers_belong_together_by_their_topic_or_by_a_key(seed):
    splits, reader = topics((60, 10, 10), longest=2000, seed=seed), Reader(seed)
    found = [
        reader.topic(one) == reader.topic(other)
        or bool(set(reader.keys(one)) & set(reader.keys(other)))
        for one, other in _pairs(splits)
    ]
    assert [int(together) for together in found] == _labels(splits).tolist()


def test_half_of_those_that_belong_together_share_a_topic_and_the_others_a_key(papers):
    reader, found = Reader(0), Counter()
    for (one, other), label in zip(_pairs(papers), _labels(papers).tolist(), strict=True):
        key = len(set(reader.keys(one)) & set(reader.keys(other)))
        if label:
            found[reader.topic(one) == reader.topic(other), key] += 1
    assert set(found) == {(True, 0), (False, 1)}
    assert found[True, 0] / found.total() == pytest.approx(0.5, abs=0.2)


def test_a_paper_has_its_keys_and_half_of_its_words_from_its_topic(papers):
    reader = Reader(0)
    shares = []
    for paper in [paper for pair in _pairs(papers) for paper in pair]:
        keys = reader.keys(paper)
        assert len(keys) == KEYS
        assert all(len(key) == 8 and set(key) <= set(string.ascii_lowercase) for key in keys)
        counts = Counter(reader.topic_of[w] for w in paper.split() if w in reader.topic_of)
        assert len(counts) <= 4
        shares.append(counts.most_common(1)[0][1] / counts.total())
    assert sum(shares) / len(shares) == pytest.approx(0.5, abs=0.03)


def test_keys_are_rare(papers):
    reader = Reader(0)
    keys = Counter(key for pair in _pairs(papers) for paper in pair for key in reader.keys(paper))
    assert keys.total() == 160 * 2 * KEYS
    assert len(keys) > 0.98 * keys.total()


def test_keys_are_a_million_different_words():
    class Counting(random.Random):
        def randrange(self, stop):
            assert stop == 10**6
            self.next = getattr(self, "next", -997) + 997
            return self.next

    rng = Counting()
    assert len({retrieval._key(rng) for _ in range(1003)}) == 1003


def test_pairs_have_two_sequences_each_and_fill_their_room(papers):
    assert [part.tokens.shape for part in papers] == [
        (120, 2, 2000),
        (20, 2, 2000),
        (20, 2, 2000),
    ]
    there = papers.train.tokens != 0
    assert int(there.sum(-1).min()) > 1980
    assert torch.equal(there.sum(-1), there.long().cumprod(-1).sum(-1))


def test_both_answers_are_as_frequent(papers):
    assert float(_labels(papers).float().mean()) == pytest.approx(0.5, abs=0.14)


def test_a_seed_gives_the_same_papers_and_another_seed_others(papers):
    again, other = (topics((120, 20, 20), longest=2000, seed=seed) for seed in (0, 1))
    for one, same in zip(papers, again, strict=True):
        assert torch.equal(one.tokens, same.tokens)
        assert torch.equal(one.labels, same.labels)
    assert not set(sum(_pairs(papers), ())) & set(sum(_pairs(other), ()))


def test_no_paper_comes_twice(papers):
    assert len(set(sum(_pairs(papers), ()))) == 320


@pytest.fixture
def shelf(monkeypatch):
    """Puts files of random bytes in the place of the library; any window of one tells which."""

    def put(count, length=3 * LONGEST + 1):
        rng = random.Random(0)
        files = [bytes(rng.randrange(254) for _ in range(length)) for _ in range(count)]
        found = [(Path(f"{n}.py"), content) for n, content in enumerate(files)]
        monkeypatch.setattr(retrieval, "library", lambda: iter(found))
        return files

    return put


def _place(window, files):
    content = window.encode("latin-1")
    assert len(content) == LONGEST
    ((file, place),) = [(n, f.find(content)) for n, f in enumerate(files) if content in f]
    return file, place


def _places(splits, files):
    return [
        [tuple(_place(_text(window), files) for window in row) for row in part.tokens]
        for part in splits
    ]


def test_two_windows_belong_together_if_they_are_of_one_file(shelf):
    files = shelf(40)
    splits = halves((50, 20, 20), longest=LONGEST)
    for part, places in zip(splits, _places(splits, files), strict=True):
        together = [int(one == other) for (one, _), (other, _) in places]
        assert part.labels.tolist() == together
        assert 2 * sum(together) == len(together)


def test_windows_of_one_file_do_not_overlap(shelf):
    files = shelf(40)
    splits = halves((200, 2, 2), longest=LONGEST)
    train = _places(splits, files)[0]
    gaps = [b - a for (one, a), (other, b) in train if one == other]
    assert min(gaps) >= LONGEST
    assert max(gaps) > 1.5 * LONGEST


@pytest.mark.parametrize("length", [2 * LONGEST, 2 * LONGEST + 1])
def test_a_file_of_two_windows_gives_both(shelf, length):
    files = shelf(40, length)
    for (_, first), (_, second) in _places(halves((20, 4, 4), longest=LONGEST), files)[0]:
        assert 0 <= first <= length - 2 * LONGEST
        assert LONGEST <= second <= length - LONGEST


def test_shorter_files_are_left_alone(shelf):
    shelf(40, 2 * LONGEST - 1)
    with pytest.raises(ValueError, match="too few long source files"):
        halves((20, 4, 4), longest=LONGEST)


def test_no_file_is_in_two_splits(shelf):
    files = shelf(50)
    places = _places(halves((200, 60, 60), longest=LONGEST), files)
    train, validation, test = ({file for pair in part for file, _ in pair} for part in places)
    assert not train & validation
    assert not train & test
    assert not validation & test
    assert [len(train), len(validation), len(test)] == [40, 5, 5]


def test_a_seed_gives_the_same_windows_and_another_seed_others(shelf):
    shelf(40)
    one, same, other = (halves((30, 4, 4), longest=LONGEST, seed=seed) for seed in (0, 0, 1))
    assert one.train.tokens.shape == (30, 2, LONGEST)
    assert torch.equal(one.train.tokens, same.train.tokens)
    assert torch.equal(one.test.tokens, same.test.tokens)
    assert not torch.equal(one.train.tokens, other.train.tokens)


def test_a_library_without_enough_files_says_what_to_take_instead(shelf):
    shelf(11)
    with pytest.raises(ValueError, match=r"too few long source files .* take the data 'topics'"):
        halves((4, 2, 2), longest=LONGEST)


@pytest.mark.parametrize("count", [12, 19, 20])
def test_a_library_that_is_not_refused_has_pairs_for_all_splits(shelf, count):
    files = shelf(count)
    places = _places(halves((4, 2, 2), longest=LONGEST), files)
    assert [len(part) for part in places] == [4, 2, 2]
