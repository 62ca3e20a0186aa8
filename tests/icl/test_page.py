import base64
import hashlib
import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from rankone.icl.ensemble import Run
from rankone.icl.folder import model_path
from rankone.icl.model import LinearTransformer
from rankone.icl.page import LONGEST, SHARED_PROMPTS, page_data, write_page
from rankone.icl.presets import PRESETS
from rankone.icl.published import NOISES
from rankone.results import prepare_folder
from rankone.storage import write_json

KINDS = ("full", "diag", "gd++")
DIM, CONTEXT = 10, 20


def make_run(folder, *, kinds=KINDS, depths=(1, 2), noises=("sigma_5",), seeds=(0,)) -> Path:
    """A folder as a reproduction leaves it, with models that are not trained."""
    config = {"preset": asdict(PRESETS["smoke"]), "recipe": {}, "seed": 0}
    prepare_folder(folder, config, resume=False)
    runs = [Run(k, n, noise, s) for k in kinds for n in depths for noise in noises for s in seeds]
    for number, run in enumerate(runs):
        scale = 0.02 if run.kind == "full" else 0.03
        options = {"kind": run.kind, "layers": run.layers, "dim": DIM, "scale": scale}
        model = LinearTransformer(**options, generator=number).double()  # as trained ones are
        for parameter in model.parameters():
            parameter.data *= 1 + 1e-9  # which float32 cannot hold
        model.save(model_path(folder, run))
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    return make_run(tmp_path / "run")


def numbers(page: Path):
    data = r'<script type="application/json" id="data">(.*?)</script>'
    (text,) = re.findall(data, page.read_text(), re.DOTALL)
    return json.loads(text)


def decode(text, dtype="<f4"):
    return np.frombuffer(base64.b64decode(text), dtype)


def record(run: Run, loss, **more):
    values = {"model": run.kind, **run._asdict(), "read_after": run.layers, "sigma": None}
    del values["kind"]
    return values | {"loss": loss, "adjusted_loss": loss} | more


def test_the_page_is_one_file_that_loads_nothing(run, tmp_path):
    page = write_page(run, tmp_path / "new" / "page.html")
    assert page == tmp_path / "new" / "page.html"
    assert [file.name for file in page.parent.iterdir()] == ["page.html"]
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "{{" not in text
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|\bsrc=|\bimport\b|\bfetch\b", text)
    assert re.findall(r'href="(.*?)"', text) == ["data:,"]


def test_the_policy_allows_this_script_and_style_and_nothing_else(run, tmp_path):
    text = write_page(run, tmp_path / "page.html").read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', text)
    allowed = dict(part.split(" ", 1) for part in policy.split("; "))
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    for name, content in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert allowed.pop(name) == f"'sha256-{digest}'"
    assert allowed.pop("img-src") == "data:"
    assert set(allowed.values()) == {"'none'"}
    assert not re.search(r"\bstyle=|\bon\w+=", text)


def test_the_whole_paper_is_less_than_a_megabyte(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    run = make_run(tmp_path / "run", depths=range(1, 9), noises=NOISES)
    page = write_page(run, tmp_path / "page.html")
    assert len(numbers(page)["models"]) == 3 * 8 * len(NOISES)
    assert page.stat().st_size < 1e6


def test_weights_are_exported_to_seven_digits(run, tmp_path):
    exported = numbers(write_page(run, tmp_path / "page.html"))["models"]
    assert {(m["kind"], m["layers"]) for m in exported} == {(k, n) for k in KINDS for n in (1, 2)}
    for model in exported:
        key = Run(model["kind"], model["layers"], model["noise"], model["seed"])
        stored = LinearTransformer.load(model_path(run, key))
        for name in ("p", "q"):
            expected = getattr(stored, name).detach().numpy().ravel()
            np.testing.assert_allclose(decode(model[name]), expected, rtol=1e-7)


def test_shared_prompts_are_whole_and_normal(run):
    prompts = [decode(text) for text in page_data(run)["prompts"]]
    assert len(prompts) == SHARED_PROMPTS
    longest = LONGEST * CONTEXT
    for prompt in prompts:
        assert prompt.shape == (DIM + (longest + 1) * (DIM + 1),)
        assert 0.9 < prompt.std() < 1.1
        assert 0.7 < prompt[-longest - 1 :].std() < 1.3


def test_noise_settings_are_in_the_order_of_the_table(tmp_path):
    noises = ("set_1_3", "sigma_5", "sigma_0")
    data = page_data(make_run(tmp_path / "run", kinds=("diag",), noises=noises))
    assert list(data["noises"]) == ["sigma_0", "sigma_5", "set_1_3"]
    sentences = [noise["sentence"] for noise in data["noises"].values()]
    assert sentences == ["σ = 0", "σ ~ U(0, 5)", "σ ∈ {1, 3}"]
    squares = [noise["mean_square"] for noise in data["noises"].values()]
    assert squares == pytest.approx([0, 25 / 3, 5])


def test_the_best_seed_that_is_there_is_taken(tmp_path):
    run = make_run(tmp_path / "run", kinds=("full",), depths=(2,), seeds=(0, 1, 2))

    def taken():
        (model,) = page_data(run)["models"]
        return model["seed"], model["loss"]

    assert taken() == (0, None)
    runs = [Run("full", 2, "sigma_5", seed) for seed in range(3)]
    losses = dict(zip(runs, (0.3, 0.1, 0.2), strict=True))
    records = [record(each, loss) for each, loss in losses.items()]
    records.append(record(runs[0], 0.0, read_after=1))
    records.append(record(runs[0], 0.0, sigma=1.0))
    write_json(run / "evaluation.json", {"records": records, "tuned": {}})
    assert taken() == (1, 0.1)
    model_path(run, runs[1]).unlink()
    assert taken() == (2, 0.2)


def test_no_text_of_a_run_becomes_markup(run, tmp_path):
    config = json.loads((run / "config.json").read_text())
    config["command"] = "rankone </script><script>alert(1)</script> {{style}}"
    write_json(run / "config.json", config)
    page = write_page(run, tmp_path / "page.html")
    assert page.read_text().count("</script>") == 2
    assert numbers(page)["origin"]["command"] == config["command"]


def test_an_older_page_is_replaced(run, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("old")
    assert write_page(run, page).read_text() != "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["page.html", "run"]


def truncate(run):
    file = run / "models" / "full-2-sigma_5-seed0.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def save(name, **options):
    def change(run):
        model = LinearTransformer(**{"kind": "full", "layers": 2} | options)
        if options.get("scale") == 0:
            model.p.data[0] = torch.inf
        model.save(run / "models" / f"{name}.safetensors")

    return change


def write(name, text):
    return lambda run: (run / name).write_text(text)


def remove_models(run):
    for file in (run / "models").iterdir():
        file.unlink()


CELL = "full-2-sigma_5-seed0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run.rename(run.with_name("gone")), "no such folder; name one that"),
        (lambda run: (run / "config.json").unlink(), "holds no config.json; name a folder of"),
        (write("config.json", "{"), r"config\.json: truncated or not JSON .*; delete it"),
        (write("config.json", '{"configuration": {"task": "text"}}'), "is not one of `rankone icl"),
        (write("config.json", "[]"), "is not one of `rankone icl reproduce`; name a folder"),
        (write("evaluation.json", "[]"), r"evaluation\.json is not rankone's .*delete it"),
        (remove_models, r"models holds no trained models; finish .* --resume` first"),
        (truncate, rf"{CELL}\.safetensors: truncated or not safetensors .*; delete it"),
        (save(CELL, kind="diag"), f"{CELL}.safetensors holds a diag model .*; delete it"),
        (save(CELL, dim=3), f"{CELL}.safetensors holds a full model .* for 3 features"),
        (save(CELL, heads=2), f"{CELL}.safetensors has 2 heads, .*; move it out"),
        (save(CELL, scale=0.0), f"{CELL}.safetensors holds numbers that are not finite; delete"),
        (save("mine"), r"mine\.safetensors is not named KIND-LAYERS-NOISE-seedSEED.*; move it"),
        (save("full-2-loud-seed0"), r"full-2-loud-seed0\.safetensors is not named .*; move it"),
    ],
)
def test_what_cannot_be_shown_is_told_in_one_line_and_nothing_is_written(
    change, message, run, tmp_path
):
    page = tmp_path / "page.html"
    page.write_text("old")
    change(run)
    with pytest.raises(ValueError, match=message) as caught:
        write_page(run, page)
    assert "\n" not in str(caught.value)
    assert page.read_text() == "old"


def test_a_file_is_no_run_and_a_folder_no_page(run, tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        write_page(run / "config.json", tmp_path / "page.html")
    with pytest.raises(ValueError, match=r"is a folder; name a file, as in .*page\.html"):
        write_page(run, tmp_path)
