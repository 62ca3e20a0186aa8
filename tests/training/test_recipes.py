import math
from dataclasses import asdict

import pytest

from rankone.models.encoder import POOLINGS
from rankone.tasks.long_range import TASKS
from rankone.training.recipes import ARENA, LAPTOP, POOLING, PRESETS, SMALL, recipe_for


def changed(recipe, base):
    """What a recipe has that another has not."""
    was = asdict(base)
    return {name: value for name, value in asdict(recipe).items() if value != was[name]}


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_every_preset(task):
    assert set(ARENA) == set(TASKS)
    for preset, base in zip(PRESETS, (SMALL, LAPTOP, ARENA[task]), strict=True):
        recipe = recipe_for(task, preset)
        assert set(changed(recipe, base)) <= {"pooling"}
        assert recipe.pooling == POOLING.get(task, "mean")
        assert recipe.small == (preset == "small")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_rate_has_risen_before_the_training_ends(task, preset):
    recipe = recipe_for(task, preset)
    assert 1 <= recipe.warm_up < recipe.steps
    assert recipe.dim % recipe.heads == 0
    assert recipe.pooling in POOLINGS


def test_what_is_asked_for_is_changed_and_nothing_else():
    assert changed(recipe_for("text", "arena", batch=7), ARENA["text"]) == {"batch": 7}
    assert changed(recipe_for("text", "arena", rate=0.25), ARENA["text"]) == {"rate": 0.25}
    both = recipe_for("listops", "small", batch=7, rate=1)
    assert changed(both, recipe_for("listops", "small")) == {"batch": 7, "rate": 1}


@pytest.mark.parametrize("steps", [1, 3, 10, 1000, 12_345])
def test_other_steps_keep_the_share_in_which_the_rate_rises(steps):
    recipe, base = recipe_for("text", "arena", steps=steps), ARENA["text"]
    assert recipe.steps == steps
    assert set(changed(recipe, base)) <= {"steps", "warm_up"}
    share = base.warm_up / base.steps * steps
    assert recipe.warm_up == max(1, round(share))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "chess"}, "task must be one of listops, text, .*, pathfinder, got 'chess'"),
        ({"preset": "huge"}, "preset must be one of small, .*arena, got 'huge'"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": -5}, "steps must be at least 1, got -5"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"rate": 0.0}, r"rate must be positive.*, got 0\.0"),
        ({"rate": -1e-3}, r"rate must be positive.*, got -0\.001"),
        ({"rate": math.nan}, "rate must be positive.*, got nan"),
        ({"rate": math.inf}, "rate must be positive.*, got inf"),
    ],
)
@pytest.mark.parametrize("preset", PRESETS)
def test_what_cannot_be_is_refused(preset, change, message):
    with pytest.raises(ValueError, match=message):
        recipe_for(**{"task": "listops", "preset": preset} | change)
