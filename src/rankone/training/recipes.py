"""How long and how fast is learned, for every task of the long range arena."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rankone.tasks.long_range import TASKS


@dataclass(frozen=True)
class Recipe:
    """AdamW with a rate that rises and then falls linearly to 0."""

    steps: int
    batch: int
    rate: float
    warm_up: int
    """Steps in which the rate rises."""
    train: int
    """Examples to learn from."""
    held: int
    """Examples to watch, and as many to be judged by."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Longest gradient."""
    dropout: float = 0.1
    dim: int = 64
    depth: int = 2
    heads: int = 2
    mlp: int = 128
    pooling: str = "mean"
    """What of a sequence is classified, see `rankone.models.EncoderConfig`."""
    checks: int = 20
    """How often the examples to watch are looked at."""
    grouped: int = 50
    """Batches whose examples are shared out by length, so that there is little padding."""
    small: bool = False
    """The small form of a task."""


SMALL = Recipe(
    steps=500, batch=32, rate=2e-3, warm_up=50, train=10_000, held=1000, dropout=0.0, checks=5,
    small=True,
)  # fmt: skip
"""A smaller form of the task."""

LAPTOP = Recipe(
    steps=300, batch=32, rate=2e-3, warm_up=30, train=10_000, held=1000, dropout=0.0, checks=2
)
"""The arena's task, with no more steps than two cores make while one waits."""

ARENA = {
    "listops": Recipe(5000, 32, 1e-3, 1000, 96_000, 2000),
    "text": Recipe(5000, 32, 1e-3, 500, 20_000, 2000),
    "retrieval": Recipe(5000, 32, 1e-3, 500, 20_000, 2000),
    "image": Recipe(5000, 128, 1e-3, 200, 45_000, 5000),
    "pathfinder": Recipe(10_000, 128, 1e-3, 300, 80_000, 5000),
}
"""Two blocks of width 64, as Xiong et al. 2021 have them; steps that a GPU makes in minutes."""

POOLING = {"listops": "first"}
"""Of tasks that are not classified by the mean: the first token of a list is its operator, which
alone is right as often as the published models are."""

PRESETS = ("small", "laptop", "arena")


def recipe_for(
    task: str,
    preset: str,
    *,
    steps: int | None = None,
    batch: int | None = None,
    rate: float | None = None,
) -> Recipe:
    """The recipe of a preset, with what was asked for otherwise."""
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    recipe = {"small": SMALL, "laptop": LAPTOP, "arena": ARENA[task]}[preset]
    recipe = replace(recipe, pooling=POOLING.get(task, recipe.pooling))
    if steps is not None:
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        warm_up = max(1, round(recipe.warm_up * steps / recipe.steps))
        recipe = replace(recipe, steps=steps, warm_up=warm_up)
    if batch is not None:
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        recipe = replace(recipe, batch=batch)
    if rate is not None:
        if not 0 < rate < math.inf:
            raise ValueError(f"rate must be positive and finite, got {rate}")
        recipe = replace(recipe, rate=rate)
    return recipe
