from dataclasses import replace

import pytest
import torch

from rankone import cli, provenance
from rankone.layers import MECHANISMS
from rankone.models import Encoder
from rankone.storage import read_json
from rankone.tasks.long_range import TASKS, Source, image
from rankone.tasks.long_range.listops import Trees, listops
from rankone.training import long_range, recipes
from rankone.training.classify import Training
from rankone.training.long_range import encoder_for, train
from rankone.training.recipes import ARENA, PRESETS, Recipe, recipe_for

FEW = ("softmax", "linear", "rfa")
RECIPE = Recipe(
    steps=4, batch=8, rate=1e-2, warm_up=1, train=24, held=16, dim=8, depth=1, mlp=8, checks=2
)
FIELDS = {
    "task", "data", "mechanism", "accuracy", "standard_error", "majority", "first_token",
    "published", "published_by", "small", "validation", "best_step", "steps", "batch", "rate",
    "parameters", "seconds",
}  # fmt: skip


def draw(sizes, *, seed):
    return listops(
        sizes, trees=Trees(depth=3, arguments=3, longer_than=3, shorter_than=14), seed=seed
    )


@pytest.fixture
def tiny(monkeypatch):
    """Three mechanisms, a task of short lists, a few steps."""
    sources = {"trees": Source(draw, True, "the task"), "others": Source(draw, False, "not it")}
    task = replace(TASKS["listops"], sources=sources, small={}, max_length=14, small_length=14)
    monkeypatch.setitem(TASKS, "listops", task)
    monkeypatch.setitem(ARENA, "listops", RECIPE)
    monkeypatch.setitem(ARENA, "image", RECIPE)
    monkeypatch.setattr(recipes, "LAPTOP", RECIPE)
    monkeypatch.setattr(recipes, "SMALL", replace(RECIPE, small=True))
    monkeypatch.setattr(long_range, "MECHANISMS", {name: MECHANISMS[name] for name in FEW})


def run(out, **options):
    chosen = {"task": "listops", "device": "cpu", "quiet": True} | options
    path = train(out=out, **chosen)
    assert path == out / "results.json"
    return read_json(path)


def snapshot(folder):
    return {
        file.relative_to(folder).as_posix(): (file.stat().st_mtime_ns, file.read_bytes())
        for file in folder.rglob("*")
        if file.is_file()
    }


def timeless(records):
    return [{key: value for key, value in r.items() if key != "seconds"} for r in records]


def test_all_mechanisms_have_a_folder_and_a_record(tiny, tmp_path):
    found = run(tmp_path / "out")
    assert set(found) == {*provenance.collect(), "seconds", "records"}
    assert [record["mechanism"] for record in found["records"]] == list(FEW)
    splits = draw((24, 16, 16), seed=0)
    for record in found["records"]:
        assert set(record) == FIELDS
        assert not any(isinstance(value, (dict, list)) for value in record.values())
        own = read_json(tmp_path / "out" / record["mechanism"] / "result.json")
        for name in ("accuracy", "standard_error", "validation"):
            assert record[name] == round(own[name], 4)
        for name in ("best_step", "parameters", "seconds"):
            assert record[name] == own[name]
        assert record["majority"] == round(splits.test.majority, 4)
        assert record["first_token"] == round(splits.by_first_token, 4)
        asked = {"task": "listops", "data": "trees", "small": True, "steps": 4, "batch": 8}
        assert asked.items() <= record.items()
    config = read_json(tmp_path / "out" / "config.json")["configuration"]
    assert (config["task"], config["data"], config["seed"]) == ("listops", "trees", 0)
    assert (config["recipe"]["steps"], config["recipe"]["small"]) == (4, True)
    files = {f"{name}/{file}" for name in FEW for file in ("model.safetensors", "result.json")}
    assert set(snapshot(tmp_path / "out")) == files | {"config.json", "results.json"}


@pytest.mark.parametrize(
    ("options", "accuracies"),
    [
        ({"preset": "arena"}, [0.371, 0.1613, None]),
        ({"preset": "laptop"}, [0.371, 0.1613, None]),
        ({"preset": "arena", "data": "trees"}, [0.371, 0.1613, None]),
        ({"preset": "arena", "data": "others"}, [None] * 3),
        ({"preset": "small"}, [None] * 3),
    ],
)
def test_a_published_number_stands_only_beside_the_arenas_task(tiny, options, accuracies, tmp_path):
    records = run(tmp_path / "out", **options)["records"]
    assert [record["published"] for record in records] == accuracies
    whose = ["Xiong et al. 2021", "Tay et al. 2021", None]
    expected = [name if number else None for name, number in zip(whose, accuracies, strict=True)]
    assert [record["published_by"] for record in records] == expected
    assert {record["small"] for record in records} == {options["preset"] == "small"}
    assert {record["data"] for record in records} == {options.get("data", "trees")}


@pytest.mark.parametrize(("folder", "published"), [("pictures", 0.382), (None, None)])
def test_of_pictures_only_cifar_is_the_arenas(tiny, folder, published, tmp_path, monkeypatch):
    pictures = draw((24, 16, 16), seed=0)
    given = []
    monkeypatch.setattr(image, "cifar", lambda folder: given.append(folder) or pictures)
    source = Source(lambda sizes, *, seed: pictures, False, "digits")
    monkeypatch.setitem(TASKS, "image", replace(TASKS["image"], sources={"digits": source}))
    options = {"task": "image", "preset": "arena", "mechanism": "softmax"}
    path = None
    if folder is not None:
        path = tmp_path / folder
        path.mkdir()
        for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
            (path / f"{name}.bin").touch()
    (record,) = run(tmp_path / "out", folder=path, **options)["records"]
    assert given == [path] * (folder is not None)
    assert record["data"] == ("digits" if folder is None else "cifar")
    assert record["published"] == published


def test_resuming_adds_a_mechanism_and_keeps_the_first(tiny, tmp_path):
    out = tmp_path / "out"
    (first,) = run(out, mechanism="linear")["records"]
    before = snapshot(out)
    records = run(out, mechanism="softmax", resume=True)["records"]
    assert [record["mechanism"] for record in records] == ["softmax", "linear"]
    assert records[1] == first
    after = snapshot(out)
    assert {name: after[name] for name in before if name != "results.json"} == {
        name: content for name, content in before.items() if name != "results.json"
    }


def test_a_mechanism_is_trained_alike_alone_and_among_all(tiny, tmp_path):
    (alone,) = run(tmp_path / "alone", mechanism="linear")["records"]
    among = run(tmp_path / "all")["records"][1]
    assert timeless([alone]) == timeless([among])


def test_what_is_done_is_not_trained_again(tiny, tmp_path, monkeypatch):
    records = run(tmp_path / "out")["records"]
    monkeypatch.setattr(Training, "run", lambda *_: pytest.fail("trained again"))
    assert run(tmp_path / "out", resume=True)["records"] == records


def test_an_interrupted_run_goes_on_where_it_was(tiny, tmp_path, monkeypatch):
    whole = run(tmp_path / "whole")["records"]
    out, step, steps = tmp_path / "out", Training._step, []

    def counted(self, number, batch):
        steps.append(number)
        if len(steps) == 7:
            raise KeyboardInterrupt
        return step(self, number, batch)

    monkeypatch.setattr(Training, "_step", counted)
    monkeypatch.setattr("rankone.training.classify.SAVED_EVERY", -1.0)
    with pytest.raises(KeyboardInterrupt):
        run(out)
    assert not (out / "results.json").exists()
    assert timeless(run(out, resume=True)["records"]) == timeless(whole)
    assert steps == [0, 1, 2, 3, 0, 1, 2, 2, 3, 0, 1, 2, 3]


def test_a_second_time_without_resume_is_refused_and_changes_nothing(tiny, tmp_path):
    run(tmp_path / "out", mechanism="linear")
    before = snapshot(tmp_path / "out")
    with pytest.raises(ValueError, match="holds results of this configuration already; add --res"):
        run(tmp_path / "out", mechanism="softmax")
    assert snapshot(tmp_path / "out") == before


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 1}, "seed: 0 there, 1 asked for"),
        ({"steps": 5}, "recipe steps: 4 there, 5 asked for"),
        ({"batch": 4}, "recipe batch: 8 there, 4 asked for"),
        ({"rate": 0.5}, r"recipe rate: 0\.01 there, 0\.5 asked for"),
        ({"preset": "arena"}, "recipe small: True there, False asked for"),
        ({"data": "others"}, "data: trees there, others asked for"),
        ({"task": "pathfinder"}, "task: listops there, pathfinder asked for"),
    ],
)
def test_a_folder_of_another_configuration_is_refused(tiny, change, difference, resume, tmp_path):
    run(tmp_path / "out", mechanism="linear")
    before = snapshot(tmp_path / "out")
    with pytest.raises(ValueError, match=rf"another configuration \({difference}\)"):
        run(tmp_path / "out", mechanism="linear", resume=resume, **change)
    assert snapshot(tmp_path / "out") == before


def test_on_the_command_line_that_is_one_line(tiny, tmp_path, capsys):
    out = str(tmp_path / "out")
    command = ["train", "listops", "--mechanism", "linear", "--device", "cpu", "--out", out]
    assert cli.main(command) == 0
    capsys.readouterr()
    assert cli.main([*command, "--seed", "1", "--resume"]) == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error.count("\n") == 1
    assert error.startswith(f"rankone: error: {out} holds the results of another configuration")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mechanism": "mamba"}, "mechanism must be one of all, softmax, linear, rfa, got 'mamba'"),
        ({"task": "chess"}, "task must be one of listops, .*, got 'chess'"),
        ({"preset": "huge"}, "preset must be one of small, .*arena, got 'huge'"),
        ({"data": "reviews"}, "data must be one of trees, others, got 'reviews'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"folder": "pictures"}, "a folder holds pictures: it is for the task image"),
        ({"task": "image", "folder": "pictures"}, "has no data_batch_1.bin"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(tiny, change, message, tmp_path):
    if "folder" in change:
        change = change | {"folder": tmp_path / change["folder"]}
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", **change)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("arena", ["as in the arena", "37.1", "16.1"]),
        ("small", ["small, not the arena's", "–"]),
    ],
)
def test_the_table_is_printed(tiny, preset, words, tmp_path, capsys):
    records = run(tmp_path / "out", preset=preset, quiet=False)["records"]
    printed = capsys.readouterr().out
    for word in ["listops: the task", "4 steps of 8", str(tmp_path / "out/results.json"), *words]:
        assert word in printed
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if line.strip()}
    for r in records:
        names = ("accuracy", "standard_error", "majority", "first_token")
        assert rows[r["mechanism"]][1:5] == [f"{100 * r[name]:.1f}" for name in names]


def test_the_path_is_printed_as_it_is(tiny, tmp_path, capsys):
    run(tmp_path / "[red]", mechanism="linear", quiet=False)
    assert str(tmp_path / "[red]" / "results.json") in capsys.readouterr().out


def test_nothing_is_printed_when_it_shall_be_quiet(tiny, tmp_path, capsys):
    run(tmp_path / "out", mechanism="linear")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("task", TASKS)
def test_models_are_those_of_the_task(task, preset):
    facts, recipe = TASKS[task], recipe_for(task, preset)
    for mechanism in MECHANISMS:
        config = encoder_for(task, mechanism, recipe)
        assert (config.mechanism, config.pair) == (mechanism, facts.pair)
        assert (config.vocabulary, config.classes) == (facts.vocabulary, facts.classes)
        longest = facts.small_length if preset == "small" else facts.max_length
        assert config.max_length == longest
        for name in ("dim", "depth", "heads", "mlp", "dropout", "pooling"):
            assert getattr(config, name) == getattr(recipe, name)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_model_reads_the_longest_sequence_to_its_end(mechanism):
    config = encoder_for("listops", mechanism, recipe_for("listops", "small"))
    model, seen = Encoder(config), []
    model.embedding.register_forward_hook(lambda module, given, x: seen.append(x))
    scores = model(torch.randint(1, 16, (1, config.max_length)))
    (gradient,) = torch.autograd.grad(scores[0, 0], seen[0])
    assert bool(gradient[0, 0].any())
    assert bool(gradient[0, -1].any())


def test_options_are_of_mechanisms_that_are_there():
    assert set(long_range.OPTIONS) <= set(MECHANISMS)
