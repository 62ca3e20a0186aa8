import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rankone import cli
from rankone.icl import reproduce as module
from rankone.icl.model import LinearTransformer
from rankone.icl.presets import FIGURES, PRESETS
from rankone.icl.progress import Narrator
from rankone.icl.reproduce import reproduce, runs_for
from rankone.icl.scoring import best_seeds
from rankone.icl.training import Recipe
from rankone.results import prepare_folder

SMOKE = PRESETS["smoke"]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("reproduce") / "smoke"
    page = reproduce(target="all", preset="smoke", out=out, quiet=True, device="cpu")
    assert page == out / "report.html"
    return out


def snapshot(folder):
    return {
        file.relative_to(folder): (file.stat().st_mtime_ns, file.read_bytes())
        for file in folder.rglob("*")
        if file.is_file()
    }


def records_of(folder):
    return json.loads((folder / "table1.json").read_text())["records"]


def test_everything_is_made(results):
    expected = {
        "config.json",
        "evaluation.json",
        "training.json",
        "report.html",
        *(f"table1.{kind}" for kind in ("json", "csv", "md", "tex")),
        *(f"figures/{name}.{kind}" for name in FIGURES for kind in ("png", "pdf")),
        *(f"models/{run.name}.safetensors" for run in runs_for("all", SMOKE, 0)),
    }
    made = {file.as_posix() for file in snapshot(results)}
    assert made == expected


def test_the_result_file_says_what_was_run_and_holds_every_cell(results):
    found = json.loads((results / "table1.json").read_text())
    for key in ("command", "device", "versions", "date", "commit", "seconds", "records"):
        assert key in found
    rows = {(row["model"], row["layers"], row["noise"]) for row in found["records"]}
    cells = {(run.kind, run.layers, run.noise) for run in runs_for("table1", SMOKE, 0)}
    closed = {
        (model, None, noise)
        for model in ("constrr", "adarr", "tunedrr", "bayes")
        for noise in SMOKE.noises
    }
    assert rows == cells | closed
    for row in found["records"]:
        assert {"adjusted_loss", "standard_error", "published", "floor"} <= row.keys()
        assert row["adjusted_loss"] > 0
        assert 0 < row["floor"] <= row["adjusted_loss"]


def test_the_configuration_is_whole(results):
    found = json.loads((results / "config.json").read_text())
    assert found["configuration"]["seed"] == 0
    assert found["configuration"]["preset"]["name"] == "smoke"
    assert found["configuration"]["recipe"]["steps"] == SMOKE.recipe["steps"]
    assert {"versions", "date", "commit"} <= found.keys()


def test_the_report_needs_no_other_file(results):
    page = (results / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert 'src="figures' not in page


def test_a_second_time_without_resume_is_refused_and_changes_nothing(results):
    before = snapshot(results)
    with pytest.raises(ValueError, match="add --resume"):
        reproduce(target="all", preset="smoke", out=results, quiet=True, device="cpu")
    assert snapshot(results) == before


@pytest.mark.parametrize("resume", [False, True])
def test_another_configuration_in_the_folder_is_refused_and_changes_nothing(results, resume):
    before = snapshot(results)
    for options, difference in (
        ({"preset": "smoke", "seed": 1}, "seed: 0 there, 1 asked for"),
        ({"preset": "laptop"}, "preset name: smoke there, laptop asked for"),
    ):
        with pytest.raises(ValueError, match=f"another configuration .*{difference}"):
            reproduce(target="all", out=results, quiet=True, device="cpu", resume=resume, **options)
    assert snapshot(results) == before


def test_resuming_trains_nothing_again_and_gives_the_same_table(results, tmp_path, monkeypatch):
    out = tmp_path / "copy"
    shutil.copytree(results, out)
    monkeypatch.setattr(module, "fit", lambda *_, **__: pytest.fail("trained again"))
    reproduce(target="table1", preset="smoke", out=out, quiet=True, device="cpu", resume=True)
    assert records_of(out) == records_of(results)
    assert (out / "table1.csv").read_bytes() == (results / "table1.csv").read_bytes()


def test_an_interrupted_target_goes_on_after_another_trained_some_of_its_runs(
    results, tmp_path, monkeypatch
):
    """table1 is interrupted, fig4 trains one of its models, table1 goes on with the others."""
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(results / "config.json", out)
    narrator = Narrator(quiet=True)
    recipe = Recipe(steps=4, batch=8, heats=1)
    preset = replace(SMOKE, layers=(1,))
    cpu = torch.device("cpu")

    def train(target):
        return module.train_missing(
            runs_for(target, preset, 0), preset, recipe, out, target, cpu, narrator
        )

    def stop(stage, step, steps, messages):
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(narrator, "training", lambda *_: stop)
        with pytest.raises(KeyboardInterrupt):
            train("table1")
    (checkpoint,) = (out / "checkpoints").rglob("*.safetensors")
    (checkpoint.parent / ".training.safetensors.0.tmp").touch()  # of a write that was killed
    train("fig4")
    models, diary = train("table1")
    assert set(models) == set(runs_for("table1", preset, 0))
    assert set(diary.restarts) == {run.name for run in models}
    assert not (out / "checkpoints").exists()


@pytest.mark.parametrize("target", ["fig1", "fig4", "fig7"])
def test_a_second_target_takes_nothing_away(target, results, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(results, out)
    reproduce(target=target, preset="smoke", out=out, quiet=True, device="cpu", resume=True)
    assert records_of(out) == records_of(results)
    before, after = (json.loads((d / "evaluation.json").read_text()) for d in (results, out))
    assert after == before
    page = (out / "report.html").read_text()
    assert page.count("data:image/png") == len(FIGURES)


def test_seeds_have_no_model_in_common():
    first, second = ({*runs_for("all", PRESETS["paper"], seed)} for seed in (0, 1))
    assert len(first) == len(second)
    assert not first & second


RUN = "full-2-sigma_5-seed0"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("training.json", "[]"),
        ("training.json", "{}"),
        ("training.json", '{"restarts": [], "messages": [], "training_seconds": 1}'),
        ("training.json", '{"restarts": {}, "messages": null, "training_seconds": 1}'),
        (
            "training.json",
            f'{{"restarts": {{"{RUN}": "x"}}, "messages": [], "training_seconds": 1}}',
        ),
        ("evaluation.json", "[]"),
        ("evaluation.json", '{"records": [{"model": "full"}], "tuned": {}}'),
        ("evaluation.json", '{"records": []}'),
    ],
)
def test_a_damaged_file_of_results_is_named_and_nothing_is_changed(name, text, results, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(results, out)
    (out / name).write_text(text)
    before = snapshot(out)
    with pytest.raises(ValueError, match=f"{name} is not rankone's .*delete it"):
        reproduce(target="table1", preset="smoke", out=out, quiet=True, device="cpu", resume=True)
    assert snapshot(out) == before


@pytest.mark.parametrize(
    "other", [{"kind": "diag", "layers": 2}, {"kind": "full", "layers": 1, "dim": 3}], ids=str
)
def test_another_model_under_a_runs_name_is_refused(other, results, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(results, out)
    LinearTransformer(**other).save(out / "models" / f"{RUN}.safetensors")
    before = snapshot(out)
    with pytest.raises(ValueError, match=f"{RUN}.safetensors holds a {other['kind']} model"):
        reproduce(target="table1", preset="smoke", out=out, quiet=True, device="cpu", resume=True)
    assert snapshot(out) == before


def test_a_truncated_model_is_named_and_nothing_is_changed(results, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(results, out)
    model = out / "models" / "full-2-sigma_5-seed0.safetensors"
    model.write_bytes(model.read_bytes()[:-8])
    before = snapshot(out)
    with pytest.raises(ValueError, match=r"full-2-sigma_5-seed0\.safetensors: truncated"):
        reproduce(target="table1", preset="smoke", out=out, quiet=True, device="cpu", resume=True)
    assert snapshot(out) == before


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    file = tmp_path / "thesis.tex"
    for out in (tmp_path, file):
        with pytest.raises(ValueError, match="not a folder of results"):
            prepare_folder(out, {"seed": 0}, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert file.read_text() == "x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "truncated or not JSON"),
        ("[]", "not one of rankone's"),
        ("{}", "not one of rankone's"),
    ],
)
def test_a_damaged_configuration_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        prepare_folder(tmp_path, {"seed": 0}, resume=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "fig8"}, "target must be one of table1, .*, all, got 'fig8'"),
        ({"preset": "huge"}, "preset must be one of smoke, laptop, paper, got 'huge'"),
        ({"seed": -1}, "seed must be from 0 to 100000, got -1"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_made(change, message, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=message):
        reproduce(**{"target": "all", "preset": "smoke", "out": out, "quiet": True} | change)
    assert not out.exists()


def one_line(capsys):
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("rankone: error: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["fig8", "--preset", "smoke"], "fig8"),
        (["all", "--preset", "huge"], "huge"),
        (["all", "--preset", "smoke", "--seed", "-1"], "seed"),
        (["all", "--preset", "smoke", "--device", "tpu"], "tpu"),
        (["all", "--preset", "smoke"], "--resume"),
        (["all", "--preset", "smoke", "--seed", "7"], "seed: 0 there, 7 asked for"),
        (["table1", "--preset", "laptop", "--resume"], "another configuration"),
    ],
    ids=str,
)
def test_bad_commands_end_with_status_2_and_one_line(arguments, word, results, capsys):
    before = snapshot(results)
    assert cli.main(["icl", "reproduce", *arguments, "--out", str(results)]) == 2
    assert word in one_line(capsys)
    assert snapshot(results) == before


def test_a_truncated_model_is_one_line_on_the_command_line(results, tmp_path, capsys):
    out = tmp_path / "copy"
    shutil.copytree(results, out)
    model = out / "models" / "diag-1-sigma_5-seed0.safetensors"
    model.write_bytes(model.read_bytes()[:-8])
    before = snapshot(out)
    command = ["icl", "reproduce", "table1", "--preset", "smoke", "--resume", "--device", "cpu"]
    assert cli.main([*command, "--out", str(out)]) == 2
    assert "diag-1-sigma_5-seed0.safetensors" in one_line(capsys)
    assert snapshot(out) == before


def test_the_best_seed_is_that_of_the_smallest_loss():
    def record(seed, loss, **more):
        base = {"model": "full", "layers": 2, "noise": "n", "sigma": None, "read_after": 2}
        return base | {"seed": seed, "adjusted_loss": loss} | more

    records = [record(0, None), record(1, 0.2), record(2, 0.1)]
    records += [record(3, 0.0, read_after=1), record(4, 0.0, sigma=1.0)]
    assert best_seeds(records) == {("full", 2, "n"): 2}
