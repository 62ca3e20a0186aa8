import json
import shutil

import pytest
import torch

from rankone.icl.ahn import reproduce as module
from rankone.icl.ahn.folder import group_path
from rankone.icl.ahn.presets import FIGURES, PRESETS, groups
from rankone.icl.ahn.report import report
from rankone.icl.ahn.reproduce import reproduce_ahn

SMOKE = PRESETS["smoke"]
NAMES = [group.name for group in groups(SMOKE)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("ahn") / "smoke"
    assert reproduce_ahn(out, preset="smoke", quiet=True) == out / "report.md"
    return out


def snapshot(folder):
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def records_of(folder):
    return json.loads((folder / "ahn.json").read_text())["records"]


def test_everything_is_made(results):
    expected = {"config.json", "ahn.json", "report.md"}
    expected |= {f"models/{name}.safetensors" for name in NAMES}
    expected |= {f"figures/{name}.{kind}" for name in FIGURES for kind in ("png", "pdf")}
    assert snapshot(results).keys() == expected


def test_the_result_file_says_what_was_run_and_holds_flat_records(results):
    found = json.loads((results / "ahn.json").read_text())
    keys = {"command", "device", "versions", "date", "commit", "seconds", "stages", "records"}
    assert keys <= found.keys()
    kinds = {r["record"] for r in found["records"]}
    assert kinds == {
        "model", "matrix", "theorem1", "optimum", "published", "baseline",
    }  # fmt: skip
    models = [r for r in found["records"] if r["record"] == "model"]
    assert [r["experiment"] for r in models if r["seed"] == 0] == NAMES
    for r in models:
        assert 0 < r["training_loss"] < 5
        assert r["median_loss"] > 0
    for r in found["records"]:
        if r["record"] == "matrix" and r["experiment"] == "theorem4":
            assert r["published"] is not None
            assert 0 <= r["distance"] <= 1


def test_the_report_has_every_part_and_every_figure(results):
    text = (results / "report.md").read_text()
    for part in ("Theorem 1", "Theorem 3", "Theorem 4", "Local minima", "figure 6", "figure 7"):
        assert part in text
    assert "This run is too small to tell where training ends." in text
    for name in FIGURES:
        assert f"(figures/{name}.png)" in text


def test_the_report_is_made_of_the_result_file_alone(results):
    found = json.loads((results / "ahn.json").read_text())
    pictures = [f"figures/{name}.png" for name in FIGURES]
    assert report(found, pictures) == (results / "report.md").read_text()


def test_published_values_stand_beside_ours_in_their_order(results):
    rows = [
        r["published"]
        for r in records_of(results)
        if r["record"] == "matrix" and r["experiment"] == "theorem3" and r["seed"] == 0
    ]
    assert rows == [-0.69, -0.43, -1.72]
    losses = {r["family"]: r for r in records_of(results) if r["record"] == "published"}
    assert losses["theorem4"]["expected_loss"] == pytest.approx(0.0513, abs=1e-4)


def test_resuming_trains_what_is_missing_only_and_gives_the_same_records(
    results, tmp_path, monkeypatch
):
    out = tmp_path / "copy"
    shutil.copytree(results, out)
    (out / "models" / "theorem3.safetensors").unlink()
    (out / "ahn.json").unlink()
    trained = []
    train = module.train

    def note(problem, family, layers, *rest, **options):
        trained.append((family, layers))
        return train(problem, family, layers, *rest, **options)

    monkeypatch.setattr(module, "train", note)
    reproduce_ahn(out, preset="smoke", quiet=True, resume=True)
    assert trained == [("theorem3", 3)]
    assert records_of(out) == records_of(results)


def test_an_interruption_keeps_the_groups_that_are_trained(tmp_path, monkeypatch):
    out = tmp_path / "out"
    train = module.train
    count = []

    def stop(*arguments, **options):
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return train(*arguments, **options)

    monkeypatch.setattr(module, "train", stop)
    with pytest.raises(KeyboardInterrupt):
        reproduce_ahn(out, preset="smoke", quiet=True)
    kept = {file.stem for file in (out / "models").iterdir()}
    assert kept == set(NAMES[:2])
    assert torch.get_num_threads() >= 1


def test_a_second_time_without_resume_is_refused_and_changes_nothing(results):
    before = snapshot(results)
    with pytest.raises(ValueError, match="add --resume"):
        reproduce_ahn(results, preset="smoke", quiet=True)
    with pytest.raises(ValueError, match=r"another configuration .*seed: 0 there, 1 asked for"):
        reproduce_ahn(results, preset="smoke", quiet=True, seed=1, resume=True)
    assert snapshot(results) == before


def test_a_damaged_or_foreign_group_is_named_and_nothing_is_changed(results, tmp_path):
    group = groups(SMOKE)[1]
    for change, message in (
        (lambda file: file.write_bytes(file.read_bytes()[:-8]), "theorem3.safetensors: truncated"),
        (
            lambda file: shutil.copy(file.with_name("theorem1.safetensors"), file),
            "theorem3.safetensors does not hold the group theorem3",
        ),
    ):
        out = tmp_path / message[-5:]
        shutil.copytree(results, out)
        change(group_path(out, group))
        before = snapshot(out)
        with pytest.raises(ValueError, match=message):
            reproduce_ahn(out, preset="smoke", quiet=True, resume=True)
        assert snapshot(out) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"preset": "huge"}, "preset must be one of smoke, laptop, paper, got 'huge'"),
        ({"seed": -1}, "seed must be from 0 to 100000, got -1"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(change, message, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=message):
        reproduce_ahn(out, **{"preset": "smoke", "quiet": True} | change)
    assert not out.exists()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_train_all_that_the_figures_need(name):
    found = groups(PRESETS[name])
    assert len({group.name for group in found}) == len(found)
    assert {"theorem1", "theorem3", "theorem4", "theorem4-expectation"} <= {g.name for g in found}
    for group in found:
        module.Recipe(**group.recipe(PRESETS[name]))
