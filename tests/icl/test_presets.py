import subprocess
import sys
from typing import get_args

import pytest

from rankone import commands
from rankone.icl.model import KINDS as MODEL_KINDS
from rankone.icl.presets import FIGURES, KINDS, PRESET_NAMES, PRESETS, TARGETS
from rankone.icl.published import NOISES
from rankone.icl.reproduce import runs_for
from rankone.icl.training import Recipe
from rankone.tasks.noise import Categorical, Uniform, noise_from_name


def test_the_command_line_offers_what_there_is():
    assert get_args(commands.Target) == (*TARGETS, "ahn")
    assert get_args(commands.Preset) == PRESET_NAMES
    assert set(KINDS) == set(MODEL_KINDS)


def test_presets_are_known_without_torch():
    code = "import sys, rankone.icl.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_recipe_on_columns_of_the_table(name):
    preset = PRESETS[name]
    assert preset.name == name
    assert Recipe(**preset.recipe).steps > 0
    assert set(preset.noises) <= set(NOISES)
    assert {"sigma_5", "set_1_3"} <= set(preset.noises)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_target_needs_some_of_the_runs_of_all(name, target):
    preset = PRESETS[name]
    runs = runs_for(target, preset, 3)
    assert runs
    assert len(set(runs)) == len(runs)
    assert set(runs) <= set(runs_for("all", preset, 3))
    assert {run.seed for run in runs} == set(range(3 * preset.seeds, 4 * preset.seeds))


def test_the_paper_preset_trains_the_whole_table_and_the_deep_models():
    preset = PRESETS["paper"]
    table, everything = runs_for("table1", preset, 0), runs_for("all", preset, 0)
    assert len(table) == 3 * 7 * 10 * 5
    assert set(everything) - set(table) == set(runs_for("fig7", preset, 0)) - set(table)
    assert {run.layers for run in set(everything) - set(table)} == {8}


def test_figures_are_seven():
    assert FIGURES == ("fig1", "fig2", "fig3", "fig4", "fig5", "fig6", "fig7")


def test_columns_name_their_noise():
    assert noise_from_name("sigma_0") == Uniform(0.0, 0.0)
    assert noise_from_name("set_1_3_5") == Categorical((1.0, 3.0, 5.0))
    for name in ("gauss_1", "sigma", "sigma_1_2", "set", ""):
        with pytest.raises(ValueError, match="noise must be named"):
            noise_from_name(name)
