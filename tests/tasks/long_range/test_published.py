"""The table of published accuracies against the papers' own tables."""

from __future__ import annotations

import pytest

from rankone.layers import MECHANISMS
from rankone.tasks.long_range import TASKS
from rankone.tasks.long_range.published import Published, published

NAMES = ("listops", "text", "retrieval", "image", "pathfinder")
# Of Xiong et al. the figure of their repository, of Tay et al. the board of theirs.
XIONG = {
    "softmax": (37.10, 65.02, 79.35, 38.20, 74.16),
    "linformer": (37.25, 55.91, 79.37, 37.84, 67.60),
    "performer": (18.80, 63.81, 78.62, 37.07, 69.87),
    "nystromformer": (37.15, 65.52, 79.56, 41.58, 70.94),
}
XIONG_MEANS = {
    "softmax": 58.77,
    "linformer": 55.59,
    "performer": 53.63,
    "nystromformer": 58.95,
}
TAY = {
    "longformer": (35.63, 62.85, 56.89, 42.22, 69.71),
    "bigbird": (36.05, 64.02, 59.29, 40.83, 74.87),
    "linear": (16.13, 65.90, 53.09, 42.34, 75.30),
}
TAY_MEANS = {"longformer": 53.46, "bigbird": 55.01, "linear": 50.55}


def test_the_tasks_are_the_five():
    assert tuple(TASKS) == NAMES


@pytest.mark.parametrize(
    ("source", "mechanism", "accuracies"),
    [("Xiong et al. 2021", *row) for row in XIONG.items()]
    + [("Tay et al. 2021", *row) for row in TAY.items()],
)
def test_accuracies_are_those_of_the_nearer_recipe(source, mechanism, accuracies):
    for task, accuracy in zip(NAMES, accuracies, strict=True):
        assert published(task, mechanism) == Published(accuracy, source)


@pytest.mark.parametrize(("mechanism", "mean"), (XIONG_MEANS | TAY_MEANS).items())
def test_accuracies_have_the_published_mean(mechanism, mean):
    found = [published(task, mechanism) for task in NAMES]
    assert sum(row.accuracy for row in found) / 5 == pytest.approx(mean, abs=0.0051)


@pytest.mark.parametrize("mechanism", sorted(set(MECHANISMS) - set(XIONG) - set(TAY)))
@pytest.mark.parametrize("task", NAMES)
def test_a_mechanism_without_a_published_accuracy_has_none(task, mechanism):
    assert published(task, mechanism) is None


def test_mechanisms_that_are_published_are_ours():
    assert set(XIONG) | set(TAY) <= set(MECHANISMS)
