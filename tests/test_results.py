import os

import pytest

from rankone import provenance
from rankone.results import prepare_folder
from rankone.storage import read_json, write_json

CONFIG = {"task": "listops", "seed": 0, "recipe": {"steps": 3, "noises": (1, 2), "rate": 0.1}}


def prepare(out, *, resume=False, **changes):
    prepare_folder(out, CONFIG | changes, resume=resume)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_a_folder_that_is_empty_or_not_there_becomes_this_configurations(resume, there, tmp_path):
    out = tmp_path / "a" / "b"
    if there:
        out.mkdir(parents=True)
    prepare(out, resume=resume)
    found = read_json(out / "config.json")
    assert set(found) == {"configuration", *provenance.collect()}
    recipe = CONFIG["recipe"] | {"noises": [1, 2]}
    assert found["configuration"] == CONFIG | {"recipe": recipe}


def test_a_device_is_named_where_it_is_another(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "collect", lambda device: {"device": device})
    prepare_folder(tmp_path / "out", CONFIG, resume=False, device="cuda")
    assert read_json(tmp_path / "out" / "config.json")["device"] == "cuda"


def test_the_same_configuration_goes_on_only_if_asked_to(tmp_path):
    prepare(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ValueError, match="holds results of this configuration already; add --res"):
        prepare(tmp_path)
    prepare(tmp_path, resume=True)
    assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 1}, "seed: 0 there, 1 asked for"),
        ({"task": "text", "seed": 1}, "task: listops there, text asked for"),
        ({"recipe": CONFIG["recipe"] | {"steps": 4}}, "recipe steps: 3 there, 4 asked for"),
        ({"recipe": CONFIG["recipe"] | {"batch": 4}}, "recipe batch: None there, 4 asked for"),
        (
            {"recipe": CONFIG["recipe"] | {"noises": (1, 3)}},
            r"recipe noises: \[1, 2\] there, \[1, 3\] asked for",
        ),
        ({"recipe": "fast"}, "recipe: {'steps': 3, .* there, fast asked for"),
        ({"more": 1}, "more: None there, 1 asked for"),
        ({"recipe": {"steps": 3}}, "it was made by another version"),
    ],
)
def test_another_configuration_is_refused_with_the_first_difference(
    change, difference, resume, tmp_path
):
    prepare(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ValueError, match=rf"another configuration \({difference}.*--out") as caught:
        prepare(tmp_path, resume=resume, **change)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "config.json").read_bytes() == before


def test_a_setting_that_is_no_longer_there_is_another_version(tmp_path):
    prepare(tmp_path, more=1)
    with pytest.raises(ValueError, match="it was made by another version"):
        prepare(tmp_path, resume=True)


def test_a_difference_is_told_shortly(tmp_path):
    prepare(tmp_path, task="x" * 500)
    with pytest.raises(ValueError, match=r"\(task: x{40} there, y{40} asked for\)"):
        prepare(tmp_path, resume=True, task="y" * 500)


@pytest.mark.parametrize("found", [[], {}, "text", {"configuration": 3}, {"seed": 0}], ids=str)
def test_a_config_of_something_else_is_refused(found, tmp_path):
    write_json(tmp_path / "config.json", found)
    with pytest.raises(ValueError, match=r"its config\.json is not one of rankone's"):
        prepare(tmp_path, resume=True)


def test_a_config_that_is_damaged_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"configuration": ')
    with pytest.raises(ValueError, match=r"config\.json: truncated or not JSON"):
        prepare(tmp_path, resume=True)


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(tmp_path, monkeypatch):
    prepare(tmp_path)
    asked = []
    monkeypatch.setattr(os, "access", lambda *given: asked.append(given))
    with pytest.raises(ValueError, match="cannot be written to; choose another --out"):
        prepare(tmp_path, resume=True)
    assert asked == [(tmp_path, os.W_OK)]


@pytest.mark.parametrize("resume", [False, True])
def test_a_file_and_a_folder_of_something_else_are_refused_and_left_alone(resume, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    for out in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(ValueError, match="exists and is not a folder of results; choose"):
            prepare(out, resume=resume)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]
    assert (tmp_path / "thesis.tex").read_text() == "x"
