"""What is trained for the figures of Ahn et al. 2023, in three sizes; nothing imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

FIGURES = tuple(f"fig{number}" for number in range(1, 8))
CONTEXT = 20
LAYERS = 3


@dataclass(frozen=True)
class Preset:
    """The size of a reproduction."""

    name: str
    seeds: int
    """Seeds of figures 1 to 5 and 7, and of Theorem 1."""
    contexts: tuple[int, ...]
    """Numbers of examples of figure 6."""
    context_seeds: int
    """Seeds of figure 6."""
    depths: tuple[int, ...]
    """Numbers of layers of figure 7."""
    draws: int
    """Draws of fresh prompts; the median one, or the mean of spiked ones, is reported."""
    curve_draws: int
    """Draws for the curves of figures 1 and 3."""
    prompts: int
    """Prompts of a draw."""
    spiked_prompts: int
    """Prompts of a draw of spiked prompts."""
    searches: int
    """Random starts of a search for exact optima."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Changes to the default `Recipe`."""
    spiked: dict[str, Any] = field(default_factory=dict)
    """Further changes for training with spiked prompts."""
    deep: dict[str, Any] = field(default_factory=dict)
    """Further changes for four layers and more, which train in white coordinates."""


@dataclass(frozen=True)
class Group:
    """Models that are trained together and kept in one file."""

    name: str
    family: Literal["theorem3", "theorem4"]
    layers: int
    context: int
    seeds: int
    weights: Literal["inverse", "identity"] = "inverse"
    spiked: bool = False
    """Trained for the expectation over all prompts instead of a sample of plain ones."""

    def recipe(self, preset: Preset) -> dict[str, Any]:
        """The settings of `Recipe` for this group."""
        deep = self.layers >= 4
        changes = preset.recipe | (preset.spiked if self.spiked else {})
        changes |= preset.deep if deep else {}
        return changes | {"spiked": self.spiked, "white": deep, "double": deep}


def groups(preset: Preset) -> list[Group]:
    """What has to be trained: Theorems 1, 3 and 4, then depths and numbers of examples.

    Figures 6 and 7 use the family of Theorem 4, as the authors' code does.
    """
    seeds = preset.seeds
    found = [
        Group("theorem1", "theorem3", 1, CONTEXT, seeds, "identity"),
        Group("theorem3", "theorem3", LAYERS, CONTEXT, seeds),
        Group("theorem4", "theorem4", LAYERS, CONTEXT, seeds),
        Group("theorem4-expectation", "theorem4", LAYERS, CONTEXT, seeds, spiked=True),
    ]
    for layers in preset.depths:
        if layers != LAYERS:
            for spiked in (False, True):
                name = f"layers-{layers}" + ("-expectation" if spiked else "")
                found.append(Group(name, "theorem4", layers, CONTEXT, seeds, spiked=spiked))
    found += [
        Group(f"examples-{n}", "theorem4", LAYERS, n, preset.context_seeds, spiked=True)
        for n in preset.contexts
        if n != CONTEXT
    ]
    return found


PRESETS = {
    "smoke": Preset(
        name="smoke",
        seeds=2,
        contexts=(4, 20),
        context_seeds=1,
        depths=(1, 3),
        draws=3,
        curve_draws=1,
        prompts=500,
        spiked_prompts=300,
        searches=16,
        recipe={"prompts": 256, "iterations": 15, "few": 128, "few_iterations": 60, "starts": 1},
    ),
    "laptop": Preset(
        name="laptop",
        seeds=5,
        contexts=tuple(range(2, 21, 2)),
        context_seeds=3,
        depths=(1, 2, 3, 4),
        draws=9,
        curve_draws=3,
        prompts=20_000,
        spiked_prompts=10_000,
        searches=64,
        recipe={"few_iterations": 600},
        spiked={"prompts": 10_000, "starts": 2},
        deep={"few": 1000, "few_iterations": 400, "scale": 0.02, "starts": 3},
    ),
    "paper": Preset(
        name="paper",
        seeds=5,
        contexts=tuple(range(2, 21, 2)),
        context_seeds=5,
        depths=(1, 2, 3, 4),
        draws=31,
        curve_draws=5,
        prompts=20_000,
        spiked_prompts=20_000,
        searches=512,
        recipe={"few": 4000, "few_iterations": 800, "iterations": 400, "starts": 8},
        deep={"few_iterations": 1500, "iterations": 800, "scale": 0.02},
    ),
}
PRESET_NAMES = tuple(PRESETS)

__all__ = ["CONTEXT", "FIGURES", "LAYERS", "PRESETS", "PRESET_NAMES", "Group", "Preset", "groups"]
