import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

import rankone
from rankone import cli, commands
from rankone.errors import BackendUnavailableError

COMMANDS = [
    ["doctor"],
    ["icl", "reproduce"],
    ["icl", "explain"],
    ["icl", "page"],
    ["icl", "experiment"],
    ["bench", "icl"],
    ["bench", "ops"],
    ["bench", "kernels"],
    ["bench", "scaling"],
    ["bench", "approximation"],
    ["mechanisms"],
    ["train"],
]


@pytest.fixture
def calls(monkeypatch):
    """Put recorders in place of the work; return what they were called with."""
    recorded = []

    def recorder(name, function):
        module = ModuleType(name)
        setattr(module, function, lambda **options: recorded.append(options))
        monkeypatch.setitem(sys.modules, name, module)

    recorder("rankone.icl.reproduce", "reproduce")
    recorder("rankone.icl.ahn.reproduce", "reproduce_ahn")
    recorder("rankone.icl.explain", "explain")
    recorder("rankone.icl.page", "write_page")
    recorder("rankone.icl.experiments.run", "experiment")
    recorder("rankone.icl.bench", "bench")
    recorder("rankone.bench.ops", "bench")
    recorder("rankone.bench.compiled", "show")
    recorder("rankone.bench.scaling", "bench")
    recorder("rankone.bench.approximation", "bench")
    recorder("rankone.report.mechanisms", "show")
    recorder("rankone.training.long_range", "train")
    recorder("rankone.doctor", "doctor")
    return recorded


def fail_with(monkeypatch, error):
    def doctor():
        raise error

    module = ModuleType("rankone.doctor")
    module.doctor = doctor
    monkeypatch.setitem(sys.modules, "rankone.doctor", module)


def test_the_script_is_installed():
    (script,) = entry_points(group="console_scripts", name="rankone")
    assert script.value == "rankone.cli:main"


def test_options_reach_the_reproduction(calls):
    options = ["--preset", "smoke", "--out", "o", "--device", "cpu", "--resume", "--seed", "4"]
    assert cli.main(["icl", "reproduce", "fig3", *options]) == 0
    assert calls == [
        {
            "target": "fig3",
            "preset": "smoke",
            "out": Path("o"),
            "device": "cpu",
            "resume": True,
            "seed": 4,
        }
    ]


@pytest.mark.parametrize("target", get_args(commands.Target))
@pytest.mark.parametrize("preset", get_args(commands.Preset))
def test_every_target_goes_with_every_preset_and_has_a_folder(calls, target, preset):
    assert cli.main(["icl", "reproduce", target, "--preset", preset]) == 0
    ahn = target == "ahn"
    assert calls[0].get("target", "ahn") == target
    assert calls[0]["preset"] == preset
    assert calls[0]["out"] == Path("runs") / (target if ahn else preset)
    assert not calls[0]["resume"]


def test_ahn_has_no_device_to_choose(calls, capsys):
    assert cli.main(["icl", "reproduce", "ahn", "--device", "cuda"]) == 2
    assert "leave out --device" in capsys.readouterr().err
    assert not calls


def test_options_reach_the_benchmark(calls):
    assert cli.main(["bench", "icl"]) == 0
    assert cli.main(["bench", "icl", "--out", "o.json", "--device", "cuda", "--quick"]) == 0
    assert calls == [
        {"out": None, "device": "auto", "quick": False},
        {"out": Path("o.json"), "device": "cuda", "quick": True},
    ]


def test_options_reach_the_benchmark_of_the_operations(calls):
    assert cli.main(["bench", "ops"]) == 0
    first = ["--out", "o.json", "--device", "cuda", "--op", "delta_rule", "--minutes", "8"]
    assert cli.main(["bench", "ops", *first, "--resume", "--quick"]) == 0
    assert cli.main(["bench", "ops", "--redraw", "o.json"]) == 0
    plain = {
        "out": None,
        "device": "auto",
        "op": "all",
        "quick": False,
        "minutes": None,
        "resume": False,
        "redraw": None,
    }
    asked = {"out": Path("o.json"), "device": "cuda", "op": "delta_rule", "minutes": 8.0}
    assert calls == [
        plain,
        plain | asked | {"resume": True, "quick": True},
        plain | {"redraw": Path("o.json")},
    ]


def test_doctor_is_called(calls):
    assert cli.main(["doctor"]) == 0
    assert calls == [{}]


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"rankone {rankone.__version__}\n"


@pytest.mark.parametrize("command", [[], ["icl"], ["bench"], *COMMANDS], ids=" ".join)
def test_help_ends_with_an_example(capsys, command):
    assert cli.main([*command, "--help"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("  rankone " + " ".join(command))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_examples_run(calls, capsys, command):
    cli.main([*command, "--help"])
    example = capsys.readouterr().out.splitlines()[-1].split()
    assert example[:1] == ["rankone"]
    assert cli.main(example[1:]) == 0
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", ["doctor", "icl", "bench"]),
        ("nothing", ["nothing", "doctor", "icl", "bench"]),
        ("icl", ["reproduce"]),
        ("icl nothing", ["nothing", "reproduce"]),
        ("icl reproduce", ["table1", "fig7", "all"]),
        ("icl reproduce table2", ["'table2'", "'target'", *get_args(commands.Target)]),
        ("icl reproduce all --preset huge", ["'huge'", "--preset", "smoke", "laptop", "paper"]),
        ("icl reproduce all --device tpu", ["'tpu'", "--device", "auto", "cpu", "cuda"]),
        ("icl reproduce all --seed one", ["--seed", "'one'"]),
        ("icl reproduce all --out", ["--out"]),
        ("icl reproduce all --rsume", ["--rsume", "--resume"]),
        ("icl reproduce all more", ["more"]),
        ("bench", ["icl", "ops", "kernels"]),
        ("bench icl --nothing", ["--nothing"]),
        ("bench ops --op attention", ["'attention'", "--op", *get_args(commands.Op)]),
        ("bench ops --minutes long", ["--minutes", "'long'"]),
        ("doctor --nothing", ["--nothing"]),
    ],
)
def test_wrong_arguments_give_one_line_and_status_2(calls, capsys, arguments, expected):
    assert cli.main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rankone: error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in expected)
    assert calls == []


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("n must be positive, got 0"), "n must be positive, got 0"),
        (ValueError("two\n  lines"), "two lines"),
        (FileNotFoundError(2, "No such file", "a.json"), "[Errno 2] No such file: 'a.json'"),
        (PermissionError(13, "Permission denied"), "[Errno 13] Permission denied"),
        (BackendUnavailableError("triton is not installed"), "triton is not installed"),
        (ValueError(), "ValueError"),
    ],
)
def test_errors_of_the_library_give_one_line_and_status_2(monkeypatch, capsys, error, line):
    fail_with(monkeypatch, error)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr() == ("", f"rankone: error: {line}\n")


def test_a_traceback_can_be_asked_for(monkeypatch):
    fail_with(monkeypatch, ValueError("wrong"))
    monkeypatch.setenv("RANKONE_TRACEBACK", "1")
    with pytest.raises(ValueError, match="wrong"):
        cli.main(["doctor"])


def test_faults_of_the_program_are_not_hidden(monkeypatch):
    fail_with(monkeypatch, TypeError("a bug"))
    with pytest.raises(TypeError, match="a bug"):
        cli.main(["doctor"])


def test_an_interrupted_reproduction_says_how_to_go_on(monkeypatch, capsys):
    def interrupt(**_options):
        raise KeyboardInterrupt

    module = ModuleType("rankone.icl.reproduce")
    module.reproduce = interrupt
    monkeypatch.setitem(sys.modules, "rankone.icl.reproduce", module)
    assert cli.main(["icl", "reproduce", "all"]) == 130
    err = capsys.readouterr().err
    assert "--resume" in err
    assert err.count("\n") == 1


def test_an_interrupted_command_that_cannot_resume_promises_nothing(monkeypatch, capsys):
    fail_with(monkeypatch, KeyboardInterrupt())
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "rankone: interrupted\n"


HEAVY = ("torch", "numpy", "numba", "matplotlib", "triton", "safetensors", "jaxtyping")


@pytest.mark.parametrize(
    "command", ["--help", "--version", "icl reproduce --help", "bench ops --help", "icl nothing"]
)
def test_help_imports_nothing_heavy(command):
    script = (
        "import sys; from rankone.cli import main; "
        f"main({command.split()!r}); "
        f"sys.exit(','.join(m for m in {HEAVY!r} if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    loaded = done.stderr.splitlines()[-1]
    assert loaded == ""


def test_subpackages_are_loaded_when_used():
    script = (
        "import sys, rankone; assert 'torch' not in sys.modules; "
        "assert 'icl' in dir(rankone); rankone.icl.NoisyRegression"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(AttributeError, match="nothing"):
        rankone.nothing  # noqa: B018
