"""Every example runs, in a small size."""

from __future__ import annotations

import runpy
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples"


def test_in_context_ridge_ranks_the_closed_forms(capsys):
    example = runpy.run_path(str(FOLDER / "in_context_ridge.py"))
    config = example["Config"](layers=2, steps=20, batch=32, heats=1, prompts=2000)
    loss = example["main"](config)
    oracle, bayes = loss["ridge that knows the noise"], loss["Bayes, noise unknown"]
    assert oracle < bayes < loss["ridge, estimated variance"] < loss["least squares"]
    assert "diag after layer 2" in capsys.readouterr().out
