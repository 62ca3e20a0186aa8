"""What is drawn, watched while it is drawn."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import jaxtyping
import numpy as np
import pytest
import torch

from rankone.tasks.long_range import pathfinder as module
from rankone.tasks.long_range.pathfinder import Scene, draw, pathfinder

HARD, EASY = Scene(), Scene(dashes=6)


class Step(NamedTuple):
    """A dash that was drawn: from where the curve was to where it is, and the dash's far end."""

    before: Any
    after: Any
    end: tuple[int, int]


class Drawn(NamedTuple):
    """A picture, and what it was made of."""

    picture: np.ndarray
    label: int
    canvas: np.ndarray
    starts: list[tuple[int, int]]
    ends: list[tuple[int, int]]
    steps: list[Step]
    tries: list[tuple[bool, int]]
    """Of each attempt at a distracting curve whether it is there, and with how many dashes."""


class Watch:
    """Keeps what the parts of a drawing return."""

    def __init__(self, patch):
        self.steps, self.curves, self.tries = [], None, []
        for name in ("_extend", "_two_curves", "_short_curve"):
            patch.setattr(module, name, getattr(self, name.strip("_"))(getattr(module, name)))

    def extend(self, original):
        def watched(rng, size, mask, tip):
            found = original(rng, size, mask, tip)
            if found is not None:
                self.steps.append(Step(tip, found[1], found[2]))
            return found

        return watched

    def two_curves(self, original):
        def watched(*args):
            self.steps.clear()
            found = original(*args)
            self.curves, self.tries = (found, list(self.steps)), []
            return found

        return watched

    def short_curve(self, original):
        def watched(*args):
            self.steps.clear()
            found = original(*args)
            self.tries.append((found is not None, 1 + len(self.steps)))
            return found

        return watched


def drawings(scene, count, seed=0):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        watch, rng, found = Watch(patch), np.random.default_rng(seed), []
        for _ in range(count):
            picture, label = draw(rng, scene)
            (canvas, _, starts, ends), steps = watch.curves
            found.append(Drawn(picture, label, canvas, starts, ends, steps, watch.tries))
        return found


@pytest.fixture(scope="module")
def hard():
    return drawings(HARD, 60)


@pytest.fixture(scope="module")
def easy():
    return drawings(EASY, 60)


@pytest.fixture(scope="module")
def bare():
    """Without distracting curves, discs are brighter than all else."""
    return drawings(replace(HARD, distractors=0), 40)


def _discs(drawn):
    """The curves on whose first and on whose last dash the discs can be."""
    bright, found = np.argwhere(drawn.picture > 228), []
    for origin, end in itertools.product((0, 1), (0, 1)):
        places = drawn.starts[origin], drawn.ends[end]
        away = np.stack([np.hypot(*(bright - place).T) for place in places])
        if (away.min(0) < 2).all() and (away.min(1) < 0.5).all():
            found.append((origin, end))
    return found


def test_the_label_says_whether_both_discs_are_on_one_curve(bare):
    """But for some pictures in which two dashes are so near that a disc covers both."""
    clear = []
    for drawn in bare:
        found = _discs(drawn)
        assert bool(drawn.label) in [origin == end for origin, end in found]
        clear += found if len(found) == 1 else []
    assert len(clear) > 0.9 * len(bare)
    assert set(clear) == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize(("name", "scene"), [("hard", HARD), ("easy", EASY)])
def test_each_long_curve_has_its_dashes_and_grows_by_turns(name, scene, request):
    for drawn in request.getfixturevalue(name):
        assert len(drawn.steps) == 2 * (scene.dashes - 1)
        for n in (0, 1):
            curve = drawn.steps[n::2]
            assert curve[0].before.tail == drawn.starts[n]
            assert all(one.after is later.before for one, later in itertools.pairwise(curve))
            assert curve[-1].end == drawn.ends[n]


def test_the_first_dash_begins_in_the_middle_and_the_other_seven_pixels_from_it(hard, easy):
    for drawn in hard + easy:
        (y, x), other = drawn.starts
        assert 14 <= y <= 17
        assert 14 <= x <= 17
        assert math.dist((y, x), other) == pytest.approx(7, abs=0.75)


def test_a_dash_turns_by_less_than_a_right_angle_and_ends_three_pixels_from_its_pivot(hard):
    turns = []
    for step in [step for drawn in hard for step in drawn.steps]:
        (y, x), (end_y, end_x) = step.after.pivot, step.end
        moved = 4 * math.sin(step.before.angle), 4 * math.cos(step.before.angle)
        assert (y, x) == tuple(
            math.ceil(a + b) for a, b in zip(step.before.pivot, moved, strict=True)
        )
        assert 2 <= math.hypot(end_y - y, end_x - x) < 3.61
        assert step.after.angle == pytest.approx(math.atan2(end_y - y, end_x - x))
        turn = abs(step.after.angle - step.before.angle)
        turns.append(min(turn, 2 * math.pi - turn))
    assert max(turns) < math.pi / 2
    assert sum(turns) / len(turns) < math.pi / 4


def test_dashes_of_a_curve_end_inside_and_at_different_pixels(hard):
    for drawn in hard:
        for curve in (drawn.steps[::2], drawn.steps[1::2]):
            ends = {step.end for step in curve}
            assert len(ends) == len(curve)
            assert all(0 < y < 31 and 0 < x < 31 for y, x in ends)


@pytest.mark.parametrize(("name", "count", "dashes"), [("hard", 5, 4), ("easy", 10, 2)])
def test_distracting_curves_have_a_third_of_the_dashes(name, count, dashes, request):
    pictures = request.getfixturevalue(name)
    there = [[length for found, length in drawn.tries if found] for drawn in pictures]
    assert {length for lengths in there for length in lengths} == {dashes}
    assert 1 <= max(len(lengths) for lengths in there) <= count
    assert sum(map(bool, there)) > len(pictures) / 3
    for drawn, lengths in zip(pictures, there, strict=True):
        failed = len(drawn.tries) - len(lengths)
        assert 5 * (count - len(lengths)) <= failed <= 5 * count


def test_what_is_drawn_of_the_long_curves_is_in_the_picture(bare):
    for drawn in bare:
        assert drawn.canvas.min() == 0
        seen = drawn.picture >= np.floor(255 * drawn.canvas)
        assert bool(seen.all())


def _brightness(drawn):
    """The brightest pixel of distracting curves, as bright as those of the canvas are."""
    y, x = np.mgrid[:32, :32]
    far = np.ones((32, 32), bool)
    for place in (*drawn.starts, *drawn.ends):
        far &= np.hypot(y - place[0], x - place[1]) > 3
    long, others = far & (drawn.canvas == drawn.canvas[far].max()), far & (drawn.canvas == 0)
    return drawn.picture[others].max() * drawn.canvas[far].max() / drawn.picture[long].max()


def test_distracting_curves_are_brighter_unless_all_are_to_be_alike(easy):
    alike, ours, theirs = drawings(replace(EASY, equal_contrast=True), len(easy)), [], []
    for plain, equal in zip(easy, alike, strict=True):
        assert (plain.label, plain.starts, plain.ends) == (equal.label, equal.starts, equal.ends)
        if any(there for there, _ in plain.tries):
            ours.append(_brightness(plain))
            theirs.append(_brightness(equal))
    assert len(ours) > 20
    brighter = [brightness * 2 / 1.5 for brightness in theirs]
    assert ours == pytest.approx(brighter, rel=0.02, abs=0.02)
    assert max(theirs) == pytest.approx(max(drawn.canvas.max() for drawn in easy), rel=0.02)


@pytest.mark.parametrize("radius", [1.5, 2.5])
def test_a_disc_has_the_radius_that_is_asked_for(radius):
    disc = module._disc(replace(HARD, marker=radius), (16, 10))
    y, x = np.mgrid[:32, :32]
    assert disc.max() == 1
    assert disc.sum() == pytest.approx(math.pi * radius**2, rel=0.1)
    assert (disc * y).sum() / disc.sum() == pytest.approx(16, abs=0.5)
    assert (disc * x).sum() / disc.sum() == pytest.approx(10, abs=0.5)


@pytest.fixture(scope="module")
def splits():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        return pathfinder((300, 50, 50), scene=EASY)


def test_both_answers_are_as_frequent(splits):
    labels = torch.cat([part.labels for part in splits])
    assert labels.unique().tolist() == [0, 1]
    assert float(labels.float().mean()) == pytest.approx(0.5, abs=0.1)


def test_images_are_1024_tokens_and_none_is_padding(splits):
    assert [part.tokens.shape for part in splits] == [(300, 1024), (50, 1024), (50, 1024)]
    for part in splits:
        assert part.tokens.dtype == torch.uint8
        assert int(part.tokens.max()) == 255
        assert int(part.tokens.min()) == 1
        assert bool((part.lengths == 1024).all())


def test_most_of_an_image_is_dark(splits):
    tokens = splits.train.tokens
    assert float((tokens == tokens.min()).double().mean()) > 0.5


def test_no_image_comes_twice(splits):
    assert len(torch.cat([part.tokens for part in splits]).unique(dim=0)) == 400


def test_tokens_are_a_row_after_another(monkeypatch):
    picture = np.arange(1024, dtype=np.uint16).reshape(32, 32) // 5 + 1
    monkeypatch.setattr(module, "draw", lambda rng, scene: (picture.astype(np.uint8), 1))
    row = pathfinder((1, 1, 1)).train.tokens[0].long()
    assert (row[1:] - row[:-1]).unique().tolist() == [0, 1]


def test_a_seed_gives_the_same_images_and_another_seed_others():
    one, same, other = (pathfinder((6, 3, 3), scene=EASY, seed=seed) for seed in (0, 0, 1))
    for part, again in zip(one, same, strict=True):
        assert torch.equal(part.tokens, again.tokens)
        assert torch.equal(part.labels, again.labels)
    ours, theirs = (torch.cat([part.tokens for part in found]) for found in (one, other))
    assert len(torch.cat([ours, theirs]).unique(dim=0)) == 24


def test_sizes_only_say_where_splits_end():
    one, other = pathfinder((6, 3, 3), scene=EASY), pathfinder((2, 4, 1), scene=EASY)
    ours, theirs = (torch.cat([part.tokens for part in found]) for found in (one, other))
    assert torch.equal(ours[:7], theirs)


def test_the_hard_images_are_drawn_unless_others_are_asked_for():
    asked = pathfinder((2, 1, 1), scene=Scene(dashes=14))
    assert torch.equal(pathfinder((2, 1, 1)).train.tokens, asked.train.tokens)


def test_each_chunk_has_a_seed_of_its_own_and_is_told(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 4)
    told = []
    found = pathfinder((5, 3, 3), scene=EASY, advance=lambda: told.append(1))
    assert len(told) == 3
    assert len(torch.cat([part.tokens for part in found]).unique(dim=0)) == 11


def test_several_processes_draw_the_same_images(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 3)
    one, two = (pathfinder((5, 2, 1), scene=EASY, processes=n) for n in (1, 2))
    for part, same in zip(one, two, strict=True):
        assert torch.equal(part.tokens, same.tokens)
        assert torch.equal(part.labels, same.labels)
