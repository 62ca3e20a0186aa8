"""Made-up reviews read by their rules, and windows of files that cannot be mistaken."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankone.tasks.long_range import text
from rankone.tasks.long_range.text import encode, library, reviews, sources, words

POLAR, NEUTRAL = 150, 2000
NEGATORS = {"not", "never", "hardly"}
LONGEST = 40


def _text(row):
    return bytes(token - 1 for token in row.tolist() if token).decode("latin-1")


def _texts(splits):
    return [_text(row) for part in splits for row in part.tokens]


def _labels(splits):
    return torch.cat([part.labels for part in splits])


class Reader:
    """What a review weighs, by the words of its seed."""

    def __init__(self, seed):
        found = words(2 * POLAR + NEUTRAL, random.Random(seed))
        self.sign = dict.fromkeys(found[:POLAR], 1) | dict.fromkeys(found[POLAR : 2 * POLAR], -1)
        self.neutral = found[2 * POLAR :]

    def weight(self, review):
        total = 0
        for sentence in review.split(". "):
            clauses = sentence.rstrip(".").split(" but ")
            total += sum(
                factor * self._clause(c) for factor, c in zip((1, 2), clauses, strict=False)
            )
        return total

    def _clause(self, clause):
        found = clause.split()
        return sum(
            -self.sign[word] if NEGATORS & set(found[max(0, n - 3) : n]) else self.sign[word]
            for n, word in enumerate(found)
            if word in self.sign
        )


@pytest.fixture(scope="module")
def made():
    return reviews((300, 100, 100), longest=1000)


@given(st.binary())
def test_bytes_are_tokens_one_more_and_none_is_padding(content):
    tokens = encode(content)
    assert [token - 1 for token in tokens] == [min(byte, 254) for byte in content]


def test_words_are_different_and_those_of_the_seed():
    found = words(3000, random.Random(5))
    assert len(set(found)) == 3000
    assert found == words(3000, random.Random(5))
    assert found != words(3000, random.Random(6))
    assert {len(word) for word in found} == {4, 6, 8}
    assert not NEGATORS & set(found)


@pytest.mark.parametrize("seed", [0, 7])
def test_the_class_of_a_review_is_the_sign_of_what_its_words_weigh(seed):
    splits, reader = reviews((120, 20, 20), longest=1000, seed=seed), Reader(seed)
    weights = [reader.weight(review) for review in _texts(splits)]
    assert 0 not in weights
    assert [int(weight > 0) for weight in weights] == _labels(splits).tolist()


def test_words_without_their_order_do_not_tell_the_class_of_a_review(made):
    sign = Reader(0).sign
    sums = [sum(sign.get(word.rstrip("."), 0) for word in r.split()) for r in _texts(made)]
    right = [(total > 0) == bool(label) for total, label in zip(sums, _labels(made), strict=True)]
    assert 0.55 < sum(right) / len(right) < 0.85


def test_sentences_are_made_as_told(made):
    reader, found = Reader(0), Counter()
    sentences = [s.rstrip(".") for review in _texts(made) for s in review.split(". ")]
    negated = []
    for sentence in sentences:
        first, *clauses = sentence.split(" but ")
        found["but"] += len(clauses)
        polar = [word in reader.sign for word in first.split()].count(True)
        assert polar <= 1
        found["polar"] += polar
        negated += [bool(NEGATORS & set(first.split()))] * polar
        assert 4 <= len(first.split()) <= 21
        for clause in clauses:
            assert sum(word in reader.sign for word in clause.split()) == 1
            assert 3 <= len(clause.split()) <= 9
    count = len(sentences)
    assert count > 3000
    assert found["polar"] / count == pytest.approx(0.3, abs=0.04)
    assert found["but"] / count == pytest.approx(0.1, abs=0.025)
    assert sum(negated) / len(negated) == pytest.approx(0.3, abs=0.06)


def test_neutral_words_are_as_frequent_as_their_rank_says(made):
    reader = Reader(0)
    found = Counter(word.rstrip(".") for review in _texts(made) for word in review.split())
    total = sum(found[word] for word in reader.neutral)
    harmonic = sum(1 / rank for rank in range(1, NEUTRAL + 1))
    for rank in (1, 2, 3, 10):
        share = found[reader.neutral[rank - 1]] / total
        assert share == pytest.approx(1 / (rank * harmonic), rel=0.12)


def test_reviews_have_both_classes_alike_and_any_length(made):
    assert made.train.tokens.shape == (300, 1000)
    assert made.validation.tokens.shape == made.test.tokens.shape == (100, 1000)
    lengths = torch.cat([part.lengths for part in made])
    assert int(lengths.max()) > 950
    assert int(lengths.min()) < 250
    assert float(_labels(made).float().mean()) == pytest.approx(0.5, abs=0.09)


def test_padding_is_only_behind_a_text(made):
    for row in made.train.tokens:
        there = row != 0
        assert bool(there[: int(there.sum())].all())


def test_a_seed_gives_the_same_reviews_and_another_seed_others(made):
    again, other = (reviews((300, 100, 100), longest=1000, seed=seed) for seed in (0, 1))
    for one, same in zip(made, again, strict=True):
        assert torch.equal(one.tokens, same.tokens)
        assert torch.equal(one.labels, same.labels)
    assert not set(_texts(made)) & set(_texts(other))


def test_no_review_comes_twice(made):
    assert len(set(_texts(made))) == 500


@pytest.fixture
def shelf(monkeypatch):
    """Puts files of random bytes in the place of the library; any window of one tells which."""

    def put(tests, others, length=3 * LONGEST):
        rng = random.Random(0)
        paths = [Path("test", f"test_{n}.py") for n in range(tests)]
        paths += [Path("pack", f"test_{n}.py") for n in range(others)]
        found = [(path, bytes(rng.randrange(254) for _ in range(length))) for path in paths]
        monkeypatch.setattr(text, "library", lambda: iter(found))
        return found

    return put


def _file_of(window, files):
    ((path, place),) = [
        (path, content.find(window)) for path, content in files if content.find(window) >= 0
    ]
    return path, place


def _found(splits, files):
    return [
        [_file_of(_text(row).encode("latin-1"), files) for row in part.tokens] for part in splits
    ]


def test_no_file_is_in_two_splits(shelf):
    files = shelf(20, 30)
    splits = sources((60, 20, 20), longest=LONGEST)
    train, validation, test = ({path for path, _ in part} for part in _found(splits, files))
    assert not train & validation
    assert not train & test
    assert not validation & test
    assert 5 < len(validation) <= 10
    assert 5 < len(test) <= 10
    assert 20 < len(train) <= 30


def test_windows_are_whole_and_from_anywhere_in_their_file(shelf):
    files = shelf(10, 10)
    splits = sources((300, 20, 20), longest=LONGEST)
    assert splits.train.tokens.shape == (300, LONGEST)
    places = [place for part in _found(splits, files) for _, place in part]
    assert min(places) < 10
    assert max(places) > 2 * LONGEST - 10
    assert all(bool((part.lengths == LONGEST).all()) for part in splits)


def test_a_window_is_labelled_by_where_its_file_lies(shelf):
    files = shelf(10, 10)
    splits = sources((30, 10, 10), longest=LONGEST)
    for part, found in zip(splits, _found(splits, files), strict=True):
        assert part.labels.tolist() == [int(path.parts[0] == "test") for path, _ in found]
        assert int(part.labels.sum()) * 2 == len(part.labels)


@pytest.mark.parametrize(
    ("path", "is_test"),
    [
        ("test/test_list.py", True),
        ("unittest/tests/x.py", True),
        ("idlelib/idle_test/x.py", True),
        ("unittest/case.py", False),
        ("test.py", False),
        ("latest/x.py", False),
    ],
)
def test_a_file_is_a_test_by_its_folders(path, is_test):
    assert text._is_test(Path(path)) == is_test


def test_short_files_are_left_alone_and_others_padded(shelf, monkeypatch):
    files = shelf(4, 4, length=LONGEST // 2) + shelf(4, 4, length=LONGEST // 2 - 1)
    monkeypatch.setattr(text, "library", lambda: iter(files))
    splits = sources((20, 4, 4), longest=LONGEST)
    assert splits.train.tokens.shape == (20, LONGEST)
    assert all(part.lengths.unique().tolist() == [LONGEST // 2] for part in splits)


def test_a_seed_gives_the_same_windows_and_another_seed_others(shelf):
    shelf(10, 10)
    one, same, other = (sources((30, 4, 4), longest=LONGEST, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.train.tokens, same.train.tokens)
    assert torch.equal(one.test.tokens, same.test.tokens)
    assert not torch.equal(one.train.tokens, other.train.tokens)


def test_there_are_files_to_learn_from_however_many_are_held_back(shelf):
    files = shelf(20, 20)
    splits = sources((2, 50, 50), longest=LONGEST)
    assert [len(found) for found in _found(splits, files)] == [2, 50, 50]


@pytest.mark.parametrize(("tests", "others"), [(2, 9), (9, 2)])
def test_a_library_without_enough_files_says_what_to_take_instead(shelf, tests, others):
    shelf(tests, others)
    with pytest.raises(ValueError, match=r"too few source files .* take the data 'reviews'"):
        sources((3, 3, 3), longest=LONGEST)


def test_the_library_is_pythons_own_in_the_order_of_names(tmp_path, monkeypatch):
    for name in ("b.py", "a/c.py", "site-packages/d.py", "a/__pycache__/e.py", "f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    monkeypatch.setattr(text.sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    assert list(library()) == [(Path("a/c.py"), b"a/c.py"), (Path("b.py"), b"b.py")]
