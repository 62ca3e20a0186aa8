"""What can be reproduced, in three sizes. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from rankone.icl.published import NOISES

FIGURES = tuple(f"fig{number}" for number in range(1, 8))
TARGETS = ("table1", *FIGURES, "all")
KINDS: Final = ("gd++", "diag", "full")


@dataclass(frozen=True)
class Preset:
    """The size of a reproduction."""

    name: str
    noises: tuple[str, ...]
    """Noise distributions, named as in the published table."""
    layers: tuple[int, ...]
    """Depths of the models."""
    extra_layers: tuple[int, ...]
    """Further depths at U(0, 5), for figures 5 to 7."""
    seeds: int
    """Runs a cell; the best is reported."""
    recipe: dict[str, Any]
    """Changes to the default `Recipe`."""
    sequences: int
    """Prompts of one draw of the evaluation."""
    draws: int
    """Draws of the evaluation; the median one is reported."""
    profile_sequences: int
    """Prompts at each noise level of one draw of a profile."""
    profile_draws: int
    """Draws of a profile; the median one is shown."""
    profile_points: int
    """Noise levels of a profile."""
    dim: int = 10
    context: int = 20


PRESETS = {
    "smoke": Preset(
        name="smoke",
        noises=("sigma_5", "set_1_3"),
        layers=(1, 2),
        extra_layers=(),
        seeds=1,
        recipe={"steps": 100, "batch": 128, "heats": 2, "heat_steps": 50, "heat_batch": 64},
        sequences=4096,
        draws=1,
        profile_sequences=512,
        profile_draws=1,
        profile_points=7,
    ),
    "laptop": Preset(
        name="laptop",
        noises=("sigma_5", "set_1_3"),
        layers=(1, 2, 3, 4, 5),
        extra_layers=(),
        seeds=2,
        recipe={
            "steps": 3000,
            "batch": 1024,
            "heats": 6,
            "heat_steps": 400,
            "heat_batch": 128,
        },
        sequences=100_000,
        draws=5,
        profile_sequences=4096,
        profile_draws=3,
        profile_points=25,
    ),
    "paper": Preset(
        name="paper",
        noises=NOISES,
        layers=(1, 2, 3, 4, 5, 6, 7),
        extra_layers=(8,),
        seeds=5,
        recipe={"steps": 8000, "heats": 16},
        sequences=100_000,
        draws=31,
        profile_sequences=8192,
        profile_draws=3,
        profile_points=41,
    ),
}
PRESET_NAMES = tuple(PRESETS)
