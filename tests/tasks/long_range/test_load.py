"""Tasks by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rankone.tasks.long_range import TASKS, image, load, pathfinder
from rankone.tasks.long_range.listops import SMALL, listops
from rankone.tasks.long_range.text import reviews

SOURCES = [(task, data) for task, facts in TASKS.items() for data in facts.sources]
SIZES = (4, 2, 2)


@pytest.mark.parametrize(("task", "data"), SOURCES)
@pytest.mark.parametrize("small", [False, True], ids=["arena", "small"])
def test_examples_are_what_the_task_says(task, data, small):
    facts = TASKS[task]
    name, splits = load(task, SIZES, data=data, small=small)
    assert name == data
    length = facts.small_length if small else facts.max_length
    for part, size in zip(splits, SIZES, strict=True):
        shape = (size, 2, length) if facts.pair else (size, length)
        assert part.tokens.shape == shape
        assert part.tokens.dtype == torch.uint8
        assert int(part.tokens.max()) < facts.vocabulary
        assert part.labels.shape == (size,)
        assert part.labels.dtype == torch.int64
        assert 0 <= int(part.labels.min()) <= int(part.labels.max()) < facts.classes
        there = part.tokens != 0
        assert torch.equal(there.sum(-1), there.long().cumprod(-1).sum(-1))


@pytest.mark.parametrize("task", TASKS)
def test_the_seed_is_handed_on(task):
    one, same, other = (load(task, SIZES, small=True, seed=seed)[1].train for seed in (3, 3, 4))
    assert torch.equal(one.tokens, same.tokens)
    assert torch.equal(one.labels, same.labels)
    assert not torch.equal(one.tokens, other.tokens)


@pytest.mark.parametrize("task", TASKS)
def test_without_a_name_the_first_source_is_taken(task):
    assert load(task, SIZES, small=True)[0] == next(iter(TASKS[task].sources))


def test_small_is_what_the_task_says():
    for task, made in [
        ("listops", listops(SIZES, trees=SMALL)),
        ("text", reviews(SIZES, longest=500)),
        ("pathfinder", pathfinder.pathfinder(SIZES, scene=pathfinder.Scene(dashes=6))),
    ]:
        assert torch.equal(load(task, SIZES, small=True)[1].train.tokens, made.train.tokens)


def test_only_what_is_drawn_as_the_arena_draws_it_says_so():
    assert [(task, data) for task, data in SOURCES if TASKS[task].sources[data].arena] == [
        ("listops", "trees"),
        ("pathfinder", "hard"),
    ]


def test_an_unknown_task_lists_those_that_are_there():
    with pytest.raises(
        ValueError,
        match="task must be one of listops, text, retrieval, image, pathfinder, got 'sudoku'",
    ):
        load("sudoku", SIZES)


def test_unknown_data_lists_those_that_are_there():
    with pytest.raises(ValueError, match="data must be one of reviews, sources, got 'imdb'"):
        load("text", SIZES, data="imdb")
    with pytest.raises(ValueError, match="data must be one of hard, got 'easy'"):
        load("pathfinder", SIZES, data="easy")


@pytest.mark.parametrize(
    ("task", "data"), [("text", None), ("pathfinder", None), ("image", "digits")]
)
def test_a_folder_is_for_pictures_alone(task, data):
    with pytest.raises(ValueError, match="it is for the task image, without data"):
        load(task, SIZES, data=data, folder=Path("cifar"))


def test_a_folder_is_read(monkeypatch, tmp_path):
    splits = load("image", SIZES)[1]
    monkeypatch.setattr(image, "check", lambda folder: None)
    monkeypatch.setattr(image, "cifar", {tmp_path: splits}.__getitem__)
    assert load("image", SIZES, folder=tmp_path) == ("cifar", splits)


def test_a_folder_without_pictures_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no data_batch_1\.bin"):
        load("image", SIZES, folder=tmp_path)
