"""The run times every line at every length, or says why not; exponents and crossings are right."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rankone.bench import scaling
from rankone.bench.clock import Clock, Effort
from rankone.bench.memory import NOISE
from rankone.bench.scaling import (
    CPU,
    GPU,
    LIMITS,
    OPTIONS,
    PASSES,
    QUICK,
    Key,
    Measurement,
    Plan,
    bench,
    crossovers,
    draw,
    exponents,
    lines,
    make,
    passes,
)
from rankone.bench.scaling_summary import LABELS, plot, show
from rankone.layers import MECHANISMS, Linear

TINY = Plan((16, 32, 64), torch.float32, dim=16, heads=2, compared=24, fit_from=16,
            effort=Effort(rounds=(1, 1), seconds=0.1, warm_up=(1, 0.0)))  # fmt: skip
FEW = [Key("softmax", False), Key("linear", False), Key("linear", True)]
HERE = torch.device("cpu")


def read(path):
    return json.loads(path.read_text())


def record(mechanism: str, T: int, ms: float, *, causal: bool = False, **more: Any) -> dict:
    facts = {"mechanism": mechanism, "causal": causal, "pass": "forward", "dtype": "float32"}
    sizes = {"device": "cpu", "B": 1, "T": T, "D": 16, "H": 2}
    return {**facts, **sizes, "ms": ms, "peak_gib": ms / 8, "error": 1e-7} | more


def place(record):
    return Key(record["mechanism"], record["causal"]), record["pass"], record["T"]


def quiet(patch):
    """Memory is not measured, and nobody asks for the commit or what else the machine does."""
    patch.setenv("RANKONE_COMMIT", "a commit")
    patch.setattr("rankone.bench.clock.busy_seconds", lambda: None)
    patch.setattr(scaling, "apart", lambda *_: 2**28)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Threads that wait for each other are slow where other programs are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        quiet(patch)
        return bench(out=tmp_path_factory.mktemp("run") / "all.json", device="cpu", plan=TINY)


@pytest.fixture(scope="module")
def result(path):
    return read(path)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A few lines on the tiny plan; options replace parts of the plan or go to `bench`."""
    quiet(monkeypatch)
    monkeypatch.setattr("rankone.bench.scaling_summary.plot", lambda result: b"a plot")
    monkeypatch.setattr(scaling, "lines", lambda: FEW)

    def run_it(**options: Any) -> Any:
        changes = {name: options.pop(name) for name in list(options) if hasattr(TINY, name)}
        options = {"out": tmp_path / "few.json", "device": "cpu"} | options
        return bench(plan=replace(TINY, **changes), **options)

    return run_it


@pytest.fixture
def spoiled(monkeypatch):
    """Training steps of one line raise an error from a length on."""
    spoiled = SimpleNamespace(error=None)
    honest = scaling.passes

    def passes(layer, x):
        def fail():
            raise spoiled.error

        calls = honest(layer, x)
        wrong = (layer.name, layer.causal) == FEW[2] and x.shape[1] >= 32
        return calls | {"training_step": fail} if wrong else calls

    monkeypatch.setattr(scaling, "passes", passes)
    return spoiled


@pytest.fixture
def raced(monkeypatch):
    """What was timed."""
    found = []
    honest = Clock.race

    def race(self, calls, **options):
        found.extend(calls)
        return honest(self, calls, **options)

    monkeypatch.setattr(Clock, "race", race)
    return found


def test_lines_are_all_mechanisms_in_all_their_ways():
    found = lines()
    assert {key.mechanism for key in found if not key.causal} == set(MECHANISMS)
    causal = {name for name, mechanism in MECHANISMS.items() if mechanism.facts.causal}
    assert {key.mechanism for key in found if key.causal} == causal
    assert len(set(found)) == len(found)


def test_every_line_has_both_passes_at_all_lengths(result):
    found = [place(r) for r in result["records"]]
    assert set(found) == {
        (key, name, T) for key in lines() for name in PASSES for T in (16, 32, 64)
    }
    assert len(set(found)) == len(found)
    for r in result["records"]:
        assert not any(isinstance(value, dict | list) for value in r.values())
        assert (r["dtype"], r["device"], r["B"], r["D"], r["H"]) == ("float32", "cpu", 1, 16, 2)
        assert r["ms"] > 0
        assert r["peak_gib"] == 0.25
        assert 0 <= r["error"] <= LIMITS[torch.float32]


def test_the_file_says_where_it_is_from_and_what_follows(result):
    stamp = {"command", "device", "versions", "date", "commit", "threads", "seconds", "options"}
    assert stamp <= set(result)
    assert result["left_out"] == []
    assert result["exponents"] == exponents(result["records"], 16)
    assert len(result["exponents"]) == len(PASSES) * len(lines())
    assert result["crossovers"] == json.loads(json.dumps(crossovers(result["records"])))


def test_passes_are_the_output_and_the_gradients_of_input_and_weights():
    layer = make(Key("linear", True), TINY, 16, HERE, torch.float32)
    x = draw(TINY, 16, HERE, torch.float32)
    calls = passes(layer, x)
    y = calls["forward"]()
    assert not y.requires_grad
    given = x.clone().requires_grad_()
    want = layer(given)
    assert torch.equal(y, want)
    want = torch.autograd.grad(want.sum(), [given, *layer.parameters()])
    got = calls["training_step"]()
    assert len(got) == len(want) == 9
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("spoil", [1.01, float("nan")])
def test_if_a_layer_is_wrong_nothing_is_timed(run, raced, monkeypatch, tmp_path, spoil):
    honest = Linear.features

    def features(self, x, *, query):
        found = honest(self, x, query=query)
        found[..., :1] *= spoil if x.dtype == torch.float32 else 1.0
        return found

    monkeypatch.setattr(Linear, "features", features)
    with pytest.raises(ValueError, match=r"linear is wrong by .*: nothing is timed"):
        run()
    assert raced == []
    assert not (tmp_path / "few.json").exists()


def test_what_takes_too_long_is_left_out_and_told(run, capsys):
    result = read(run(pass_seconds=0.0))
    assert {r["T"] for r in result["records"]} == {16, 32}
    out = {(r["mechanism"], r["causal"], r["pass"], r["from_T"]) for r in result["left_out"]}
    assert out == {(*key, name, 64) for key in FEW for name in PASSES}
    assert "left out: linear, causal, training step, from T = 64: a pass of" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(("growth", "seconds"), [(1, 6), (2, 6), (3, 9), (4, 12), (8, 12)])
def test_powers_from_one_to_two_are_expected(monkeypatch, growth, seconds):
    monkeypatch.setattr(scaling, "lines", lambda: FEW[1:2])
    times = ((32, 3000.0), (8, 1.0), (16, 3000.0 / growth))
    records = [record("linear", T, ms, **{"pass": name}) for name in PASSES for T, ms in times]
    for allowed, number in ((seconds - 0.1, 2), (seconds + 0.1, 0)):
        run = Measurement(replace(TINY, pass_seconds=allowed), HERE, list(records))
        run.errors = {FEW[1]: 0.0}
        monkeypatch.setattr(run, "_peak", lambda *_: None)
        run.length(64)
        why = f"a pass of about {seconds} s is to be expected"
        assert [r["why"] for r in run.left_out] == number * [why]
        assert len(run.records) == len(records) + 2 - number


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 TiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_what_has_too_little_memory_is_left_out_and_told(run, spoiled, capsys, error):
    spoiled.error = error
    result = read(run())
    gone = [(FEW[2], "training_step", T) for T in (32, 64)]
    found = {place(r) for r in result["records"]}
    assert found == {(key, name, T) for key in FEW for name in PASSES for T in (16, 32, 64)} - {
        *gone
    }
    facts = {"mechanism": "linear", "causal": True, "pass": "training_step", "from_T": 32}
    assert result["left_out"] == [facts | {"why": "too little memory"}]
    assert "linear, causal, training step, from T = 32: too little memory" in (
        capsys.readouterr().out
    )


def test_other_errors_end_the_run(run, spoiled):
    spoiled.error = RuntimeError("shapes do not agree")
    with pytest.raises(RuntimeError, match="shapes do not agree"):
        run()


def test_a_run_is_resumed_where_it_stopped(run, raced):
    path = run(lengths=TINY.lengths[:2])
    first = read(path)
    raced.clear()
    whole = read(run(resume=True))
    assert sorted(raced) == sorted(2 * FEW)
    assert whole["records"][: len(first["records"])] == first["records"]
    assert {r["T"] for r in whole["records"][len(first["records"]) :]} == {64}
    raced.clear()
    assert read(run(resume=True))["records"] == whole["records"]
    assert raced == []


def test_only_what_is_missing_is_measured(run, raced):
    path = run()
    result = read(path)
    (gone,) = (r for r in result["records"] if place(r) == (FEW[2], "forward", 32))
    result["records"].remove(gone)
    path.write_text(json.dumps(result))
    raced.clear()
    whole = read(run(resume=True))["records"]
    assert raced == [FEW[2]]
    assert whole[:-1] == result["records"]
    assert place(whole[-1]) == place(gone)


def test_without_resume_all_is_measured_anew(run, raced):
    run(lengths=(16,))
    raced.clear()
    result = read(run(lengths=(16,)))
    assert len(raced) == len(result["records"]) == len(PASSES) * len(FEW)


@pytest.mark.parametrize("name", ["device", "versions", "commit", "threads"])
def test_a_run_from_elsewhere_is_not_resumed(run, raced, name):
    path = run(lengths=(16,))
    path.write_text(json.dumps(read(path) | {name: "another"}))
    raced.clear()
    with pytest.raises(ValueError, match=f"cannot be resumed: its {name} is another, here it is"):
        run(resume=True)
    assert raced == []


@pytest.mark.parametrize("text", ["[]", "{}"])
def test_what_is_no_result_is_not_resumed(run, tmp_path, text):
    (tmp_path / "few.json").write_text(text)
    with pytest.raises(ValueError, match="no result of rankone bench scaling"):
        run(resume=True)


def test_no_length_is_begun_when_the_time_is_up(run, monkeypatch, capsys):
    seconds = [0.0]
    honest = Measurement.length

    def length(self, T):
        honest(self, T)
        seconds.append(seconds[-1] + 60)

    monkeypatch.setattr(scaling, "time", SimpleNamespace(monotonic=lambda: seconds[-1]))
    monkeypatch.setattr(Measurement, "length", length)
    result = read(run(minutes=0.9))
    assert {r["T"] for r in result["records"]} == {16}
    assert "the time was up at T = 32: --resume measures the rest" in capsys.readouterr().err


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan")])
def test_minutes_are_positive(run, minutes):
    with pytest.raises(ValueError, match="minutes must be positive"):
        run(minutes=minutes)


def test_the_plot_is_drawn_and_can_be_drawn_again(path, monkeypatch):
    monkeypatch.setattr(scaling, "Measurement", None)
    picture = path.with_suffix(".png")
    first, before = picture.read_bytes(), path.read_bytes()
    assert first.startswith(b"\x89PNG")
    picture.unlink()
    assert bench(redraw=path) == path
    assert picture.read_bytes() == first
    assert path.read_bytes() == before


def test_times_without_memory_are_drawn():
    records = [record("linear", T, 1.0, peak_gib=None) for T in (16, 32)]
    assert plot({"device": "here", "records": records}).startswith(b"\x89PNG")


def test_the_tables_show_all_lines(result, capsys):
    show(result)
    tables = capsys.readouterr().out.split(LABELS["training_step"] + ", D = 16")
    assert len(tables) == 2
    for name, table in zip(PASSES, tables, strict=True):
        for key in lines():
            (row,) = (x for x in table.splitlines() if x.startswith(f"  {key}  "))
            (fit,) = (x for x in result["exponents"] if place(x | {"T": 0}) == (key, name, 0))
            numbers = row.removeprefix(f"  {key}  ").split()
            assert numbers[3:6] == [f"{fit['ms_exponent']:.2f}", "0.250", "0.00"]


@pytest.mark.parametrize(("others", "told"), [(None, False), (0.05, False), (0.7, True)])
def test_times_of_a_busy_machine_are_not_to_be_trusted(result, capsys, others, told):
    show(result | {"other_cores": others})
    assert ("Do not trust these times" in capsys.readouterr().out) is told


def test_power_laws_are_recovered():
    lengths = (512, 1024, 2048, 4096)
    records = [record("linear", T, 1e-3 * T, peak_gib=1e-6 * T**0.5) for T in lengths]
    records += [record("softmax", T, 1e-6 * T**2, causal=True) for T in lengths]
    records += [record("rfa", T, 1e-3 * T**1.5, **{"pass": "training_step"}) for T in lengths]
    found = {place(fit | {"T": 0})[:2]: fit for fit in exponents(records, 512)}
    assert {place: fit["ms_exponent"] for place, fit in found.items()} == {
        (Key("linear", False), "forward"): 1.0,
        (Key("softmax", True), "forward"): 2.0,
        (Key("rfa", False), "training_step"): 1.5,
    }
    linear = found[Key("linear", False), "forward"]
    assert (linear["from_T"], linear["to_T"], linear["peak_gib_exponent"]) == (512, 4096, 0.5)


def test_three_lengths_that_are_long_enough_are_fitted():
    records = [record("linear", T, 1e-3 * T, peak_gib=None) for T in (1024, 2048, 4096)]
    short = [record("linear", 512, 100.0)]
    (fit,) = exponents([*short, *records], 1024)
    assert (fit["ms_exponent"], fit["peak_gib_exponent"]) == (1.0, None)
    assert exponents([*short, *records[:2]], 1024) == []


@pytest.mark.parametrize(
    ("times", "T"),
    [
        ({T: 3000.0 * T for T in (1024, 2048, 4096, 8192)}, 3000),
        ({T: 2048.0 * T for T in (1024, 2048, 4096)}, 2048),
        ({2048: 1.0, 8192: 1.0}, 2048),
        ({1024: 2.0 * 1024**2, 2048: 2.0 * 2048**2}, None),
        ({1024: 1.0, 2048: 2.0 * 2048**2}, None),
        ({1024: 1.0, 2048: 4.0 * 2048**2, 4096: 0.25 * 4096**2}, 2896),
        ({T: T**2 * (0.5, 2.0)[n % 2] for n, T in enumerate((512, 1024, 2048, 4096, 8192))}, 5793),
    ],
)
def test_softmax_is_overtaken_where_the_times_cross_for_good(times, T):
    theirs = [record("softmax", n, n**2, causal=True) for n in (8192, 4096, 2048, 1024, 512)]
    others = [record("softmax", n, 1e-9) for n in times]
    ours = [record("linear", n, ms, causal=True) for n, ms in times.items()]
    facts = {"mechanism": "linear", "causal": True, "pass": "forward"}
    assert crossovers([*ours, *others, *theirs]) == [facts | {"T": T}]


def test_what_softmax_was_not_measured_beside_has_no_crossing():
    longer = [record("linear", 2048, 1.0), record("softmax", 1024, 2.0)]
    of_another_kind = [record("rfa", 1024, 1.0, causal=True)]
    assert crossovers([*longer, *of_another_kind]) == []


@pytest.mark.parametrize("plan", [CPU, GPU, QUICK])
def test_plans_can_be_run(plan):
    assert list(plan.lengths) == sorted(set(plan.lengths))
    assert sum(plan.fit_from <= T for T in plan.lengths) >= 3
    assert plan.dtype in LIMITS
    assert set(OPTIONS) <= set(MECHANISMS)
    for key in lines():
        layer = make(key, plan, 256, HERE, torch.float32)
        assert (layer.name, layer.causal, layer.dim) == (*key, plan.dim)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what a process holds")
def test_memory_on_the_cpu_is_that_of_the_pass():
    plan = replace(TINY, dim=64)
    run, key, T = Measurement(plan, HERE, []), Key("linear", False), 16384
    forward, both = (run._peak(key, T, name, lambda: None) for name in PASSES)
    assert max(NOISE, 4 * T * 4 * 64) < forward * 2**30 < both * 2**30
