"""Batches of labelled sequences."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankone.tasks.long_range.examples import Examples, Splits, padded, split


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _examples(lengths):
    """Example n has so many tokens, all n + 1, and the label n."""
    rows = [bytes([n + 1]) * length for n, length in enumerate(lengths)]
    return Examples(padded(rows, max(lengths) + 3), torch.arange(len(lengths)))


def _scattered(count, seed=0):
    """Lengths from 1 on, in any order."""
    return (torch.randperm(count, generator=_generator(seed)) + 1).tolist()


def _round(examples, size, **options):
    count = len(examples.labels) // min(size, len(examples.labels))
    return list(islice(examples.orders(size, _generator(), **options), count))


def test_sequences_are_padded_behind():
    rows = padded([bytes([1, 255]), bytes([3, 2, 1]), bytes([7])], 3)
    assert rows.tolist() == [[1, 255, 0], [3, 2, 1], [7, 0, 0]]
    assert rows.dtype == torch.uint8


def test_splits_take_examples_in_their_order():
    tokens, labels = torch.arange(1, 13, dtype=torch.uint8).reshape(6, 2), torch.arange(6)
    train, validation, test = split(tokens, labels, (3, 1, 2))
    assert [part.labels.tolist() for part in (train, validation, test)] == [[0, 1, 2], [3], [4, 5]]
    assert torch.equal(torch.cat([train.tokens, validation.tokens, test.tokens]), tokens)


def test_take_cuts_to_the_longest_of_those_taken():
    tokens, labels = _examples([2, 5, 3, 9]).take(torch.tensor([2, 0]))
    assert tokens.tolist() == [[3, 3, 3], [1, 1, 0]]
    assert labels.tolist() == [2, 0]
    assert tokens.dtype == labels.dtype == torch.int64


def test_take_keeps_all_tokens_of_the_longest_sequence():
    rows = padded([bytes([1, 2, 3, 4])], 4)
    batch = Examples(rows, torch.tensor([0])).take(torch.tensor([0]))
    assert batch.tokens.tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("longer", [0, 1])
def test_pairs_are_cut_to_the_longer_sequence(longer):
    short, long = padded([b"\1\2", b"\3"], 8), padded([b"\4", b"\5\6\7"], 8)
    rows = torch.stack([long, short] if longer == 0 else [short, long], dim=1)
    pairs = Examples(rows, torch.tensor([1, 0]))
    batch = pairs.take(torch.tensor([0, 1]))
    assert batch.tokens.shape == (2, 2, 3)
    assert torch.equal(batch.tokens, rows[..., :3].long())
    assert pairs.lengths.tolist() == [3, 4]


def test_a_batch_goes_to_a_device_whole():
    batch = _examples([2, 3]).take(torch.tensor([0, 1])).to(torch.device("meta"))
    assert batch.tokens.device.type == batch.labels.device.type == "meta"


@given(
    batches=st.integers(1, 6),
    size=st.integers(1, 7),
    rest=st.integers(0, 6),
    grouped=st.integers(1, 8),
)
def test_no_example_comes_twice_in_a_round(batches, size, rest, grouped):
    examples = _examples(_scattered(batches * size + rest % size))
    orders = examples.orders(size, _generator(), grouped=grouped)
    for _ in range(3):
        found = list(islice(orders, batches))
        assert {len(batch) for batch in found} == {size}
        assert torch.cat(found).unique().numel() == batches * size


@given(batches=st.integers(1, 9), size=st.integers(1, 7), grouped=st.integers(1, 5))
def test_each_example_comes_once_before_any_comes_again(batches, size, grouped):
    examples = _examples(_scattered(batches * size))
    orders = examples.orders(size, _generator(), grouped=grouped)
    for _ in range(3):
        found = torch.cat(list(islice(orders, batches)))
        assert found.sort().values.tolist() == list(range(batches * size))


@pytest.mark.parametrize("grouped", [1, 3])
def test_what_is_left_out_of_a_round_is_not_always_the_same(grouped):
    orders = _examples(_scattered(11)).orders(4, _generator(), grouped=grouped)
    assert set(torch.cat(list(islice(orders, 40))).tolist()) == set(range(11))


def test_a_batch_larger_than_the_split_holds_all_of_it():
    orders = _examples(_scattered(5)).orders(8, _generator())
    for which in islice(orders, 3):
        assert which.sort().values.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("grouped", [1, 4])
def test_orders_are_those_of_the_generator(grouped):
    examples = _examples(_scattered(60))

    def order(seed):
        found = examples.orders(5, _generator(seed), grouped=grouped)
        return torch.cat(list(islice(found, 24)))

    one = order(1)
    assert torch.equal(one, order(1))
    assert not torch.equal(one, order(2))
    assert not torch.equal(one[:60], one[60:])


@given(batches=st.integers(2, 12), size=st.integers(1, 6), grouped=st.integers(2, 5))
def test_batches_of_a_group_share_its_examples_out_by_length(batches, size, grouped):
    examples = _examples(_scattered(batches * size))
    found = _round(examples, size, grouped=grouped)
    for first in range(0, batches, grouped):
        lengths = sorted(
            examples.lengths[which].sort().values.tolist()
            for which in found[first : first + grouped]
        )
        assert all(one[-1] <= next_one[0] for one, next_one in pairwise(lengths))


def test_batches_of_a_group_come_in_any_order():
    examples = _examples(_scattered(48))
    orders = examples.orders(4, _generator(), grouped=12)
    places = [
        [int(examples.lengths[which].min()) for which in islice(orders, 12)] for _ in range(4)
    ]
    assert all(sorted(found) == places[0] or found != sorted(found) for found in places)
    assert len({tuple(found) for found in places}) == 4


def test_groups_need_less_padding():
    examples = _examples(_scattered(200))

    def padding(grouped):
        return sum(
            int((examples.take(which).tokens == 0).sum())
            for which in _round(examples, 10, grouped=grouped)
        )

    assert padding(20) < padding(4) < padding(1)


@given(count=st.integers(1, 40), size=st.integers(1, 9))
def test_in_order_gives_all_once_with_the_shortest_first(count, size):
    lengths = _scattered(count)
    batches = list(_examples(lengths).in_order(size))
    found = [label for batch in batches for label in batch.labels.tolist()]
    assert found == sorted(range(count), key=lengths.__getitem__)
    assert [len(batch.labels) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    for batch in batches:
        assert batch.tokens.amax(1).tolist() == (batch.labels + 1).tolist()
        assert batch.tokens.shape[1] == max(lengths[n] for n in batch.labels)


def test_lengths_do_not_count_padding():
    assert _examples([2, 5, 1]).lengths.tolist() == [2, 5, 1]


def test_majority_is_the_share_of_the_most_frequent_label():
    tokens = torch.ones(5, 1, dtype=torch.uint8)
    assert Examples(tokens, torch.tensor([2, 0, 2, 1, 2])).majority == pytest.approx(0.6)
    assert Examples(tokens, torch.tensor([7, 7, 7, 7, 7])).majority == 1


def _starting(firsts, labels, pair=False):
    """Sequences of these first tokens; of pairs the first ones, before others with a token 9."""
    tokens = torch.full((len(firsts), 2, 3) if pair else (len(firsts), 3), 9, dtype=torch.uint8)
    tokens.flatten(1)[:, 0] = torch.tensor(firsts, dtype=torch.uint8)
    return Examples(tokens, torch.tensor(labels))


@pytest.mark.parametrize("pair", [False, True])
def test_first_tokens_tell_what_was_most_frequent_behind_them_in_training(pair):
    train = _starting([5, 5, 5, 255, 255, 255, 1], [2, 2, 0, 1, 1, 2, 0], pair)
    unseen = _starting([5, 255], [0, 0], pair)
    test = _starting([5, 5, 255, 255, 1], [2, 0, 1, 1, 3], pair)
    assert Splits(train, unseen, test).by_first_token == pytest.approx(3 / 5)
    assert Splits(train, test, unseen).by_first_token == 0
