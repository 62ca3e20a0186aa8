"""`rankone icl explain` on a run of a few untrained models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankone.icl import LinearTransformer
from rankone.icl.chosen import chosen_models
from rankone.icl.ensemble import Run
from rankone.icl.explain import explain, show
from rankone.icl.folder import model_path
from rankone.icl.probes import Layer
from rankone.storage import write_json

KINDS = ("full", "diag", "gd++")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three kinds, two depths, two seeds."""
    preset = {"name": "tiny", "dim": 3, "context": 8}
    write_json(tmp_path / "config.json", {"configuration": {"preset": preset}})
    for kind in KINDS:
        for layers in (1, 2):
            for seed in (0, 1):
                model = LinearTransformer(kind=kind, layers=layers, dim=3, generator=seed)
                model.save(model_path(tmp_path, Run(kind, layers, "sigma_2", seed)))
    return tmp_path


def test_all_kinds_are_probed_at_the_deepest_depth(run, capsys):
    out = explain(run, noise="sigma_2", sigma=(0.0, 2.0))
    content = json.loads((out / "explain.json").read_text())
    assert {"command", "device", "versions", "date", "commit", "seconds"} <= content.keys()
    records = content["records"]
    assert {(r["model"], r["sigma"], r["layer"]) for r in records} == {
        (kind, sigma, n) for kind in KINDS for sigma in (0.0, 2.0) for n in range(3)
    }
    assert set(Layer._fields) <= set(records[0])
    assert (out / "explain.png").read_bytes().startswith(b"\x89PNG")
    assert "gd++, 2 layers, trained on sigma_2; prompts with σ² = 4" in capsys.readouterr().out


def test_one_of_them_can_be_asked_for(run, capsys):
    out = explain(run, kind="diag", layers=1, noise="sigma_2", sigma=[1.0], quiet=True)
    records = json.loads((out / "explain.json").read_text())["records"]
    assert [(r["model"], r["layers"], r["layer"]) for r in records] == [
        ("diag", 1, 0),
        ("diag", 1, 1),
    ]
    assert not capsys.readouterr().out
    show(records)
    assert "acts as if" in capsys.readouterr().out


def test_the_best_seed_is_chosen(run):
    def record(seed: int, loss: float) -> dict[str, object]:
        cell = {"model": "diag", "layers": 1, "noise": "sigma_2", "seed": seed}
        return cell | {"read_after": 1, "sigma": None, "loss": loss, "adjusted_loss": loss}

    write_json(run / "evaluation.json", {"records": [record(0, 0.5), record(1, 0.2)], "tuned": {}})
    found = chosen_models(run)
    assert Run("diag", 1, "sigma_2", 1) in found.models
    assert found.losses[Run("diag", 1, "sigma_2", 1)] == 0.2
    assert Run("full", 1, "sigma_2", 0) in found.models  # nothing is known of these
    assert (found.dim, found.context) == (3, 8)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": "sigma_5"}, "noise must be one that was trained on, sigma_2; got sigma_5"),
        ({"layers": 7}, r"layers must be a depth that was trained for all on sigma_2, 1, 2; got 7"),
        ({"kind": "half"}, "kind must be one of all, full, diag, gd"),
        ({"sigma": ()}, r"sigma must be standard deviations, at least 0, got \[\]"),
        ({"sigma": (-1.0,)}, "at least 0"),
    ],
)
def test_what_is_not_there_is_refused(run, options, message):
    with pytest.raises(ValueError, match=message):
        explain(run, **{"noise": "sigma_2"} | options)
    assert not (run / "explain").exists()


def test_folders_that_are_none_of_ours_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such folder; name one that `rankone icl reproduce`"):
        explain(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        explain(tmp_path)
