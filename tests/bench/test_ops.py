"""The run measures what it says, keeps what it has, and ends where ours is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bench.tiny import TINY
from rankone import ops as public
from rankone.bench import ops as module
from rankone.bench import parity, peers
from rankone.bench.cases import (
    CPU,
    GPU,
    OPS,
    OURS,
    PASSES,
    PEERS,
    QUICK_CPU,
    QUICK_GPU,
    Case,
)
from rankone.bench.memory import NOISE, peak_gib
from rankone.bench.parity import ParityError
from rankone.bench.peers import bind, find
from rankone.bench.plots import plot

CONTRACT = ("op", "impl", "pass", "dtype", "device", "B", "T", "H", "K", "V", "ms", "peak_gib")


def read(path):
    return json.loads(path.read_text())


@pytest.fixture
def spoiled(monkeypatch):
    """The form in chunks goes wrong from a length on; 10^9 is never reached."""
    honest = public.delta_rule
    limit = SimpleNamespace(length=10**9)

    def delta_rule(q, *args, impl, **options):
        found = honest(q, *args, impl=impl, **options)
        if q.dtype == torch.float32 and q.shape[1] >= limit.length:
            return found._replace(output=1.01 * found.output)
        return found

    monkeypatch.setattr(public, "delta_rule", delta_rule)
    return limit


def test_every_case_has_both_passes_of_all_that_is_there(run):
    result = read(run())
    found = {(r["op"], r["impl"], r["decay"], r["pass"], r["T"]) for r in result["records"]}
    entries = {("chunked", False), ("chunked", True), ("sdpa", False)}
    assert found == {
        (op, *entry, name, shape.T)
        for op in OPS
        for entry in entries
        for name in PASSES
        for shape in TINY.shapes
    }
    assert len(found) == len(result["records"])
    for record in result["records"]:
        assert set(CONTRACT) <= set(record)
        assert record["ms"] > 0
        assert record["within"]


def test_the_file_says_where_it_is_from(run):
    result = read(run())
    stamp = {"command", "device", "versions", "date", "commit", "seconds", "records"}
    assert stamp <= set(result)
    assert result["copy_gb_per_s"] > 0


def test_ours_is_compared_at_every_shape_and_the_peers_at_the_small_one(run):
    result = read(run(longest_compared_peer=0))
    ours = {(r["op"], r["decay"], r["T"]) for r in result["parity"] if r["impl"] == "chunked"}
    lengths = {TINY.compared, *(shape.T for shape in TINY.shapes)}
    assert ours == {(op, decay, T) for op in OPS for decay in (False, True) for T in lengths}
    assert {r["T"] for r in result["parity"] if r["impl"] == "sdpa"} == {TINY.compared}


def test_peers_that_are_not_there_are_told_and_the_run_goes_on(run, capsys):
    result = read(run(impls=("triton", *TINY.impls), op="delta_rule"))
    absent = {(r["impl"], r["decay"]): r["why"] for r in result["absent"]}
    assert absent["transformers", False] == "transformers is not installed"
    assert absent["sdpa", True] == "softmax attention has no decay"
    assert "absent: delta_rule, transformers: transformers is not installed" in (
        capsys.readouterr().out
    )


def test_a_peer_that_cannot_be_imported_is_absent(run, monkeypatch):
    def broken():
        raise AttributeError("no such thing\nin this version")

    monkeypatch.setattr(peers, "installed_version", lambda package: "9.9")
    monkeypatch.setattr(peers, "_load_transformers", broken)
    result = read(run(op="delta_rule"))
    why = {r["why"] for r in result["absent"] if r["impl"] == "transformers"}
    assert why == {"cannot be imported: AttributeError: no such thing"}


def test_a_peer_that_fails_is_absent(run, monkeypatch):
    def broken(*_args, **_options):
        raise RuntimeError("not for this shape")

    monkeypatch.setattr(peers, "installed_version", lambda package: "9.9")
    monkeypatch.setattr(peers, "_load_transformers", lambda: (broken,))
    result = read(run(op="delta_rule"))
    why = {r["why"] for r in result["absent"] if r["impl"] == "transformers"}
    assert why == {"it fails: RuntimeError: not for this shape"}


def test_if_ours_is_wrong_nothing_is_written(run, spoiled, tmp_path):
    spoiled.length = TINY.compared
    with pytest.raises(ParityError, match="no time is reported"):
        run()
    assert not (tmp_path / "ops.json").exists()


def test_if_ours_is_wrong_at_a_later_shape_the_file_is_as_it_was(run, spoiled, tmp_path):
    path = tmp_path / "ops.json"
    path.write_text("{}")
    spoiled.length = TINY.shapes[-1].T
    with pytest.raises(ParityError):
        run()
    assert path.read_text() == "{}"


def test_a_run_is_resumed_where_it_stopped(run, monkeypatch):
    path = run(shapes=TINY.shapes[:1])
    first = read(path)
    timed = []
    honest = module.Measurement._time

    def spy(self, case, entries, name):
        timed.append((case.op, case.shape.T))
        honest(self, case, entries, name)

    monkeypatch.setattr(module.Measurement, "_time", spy)
    whole = read(run(resume=True))
    assert {T for _, T in timed} == {TINY.shapes[1].T}
    kept = [r for r in whole["records"] if r["T"] == TINY.shapes[0].T]
    assert [r["ms"] for r in kept] == [r["ms"] for r in first["records"]]
    assert len(whole["records"]) == 2 * len(first["records"])
    timed.clear()
    assert len(read(run(resume=True))["records"]) == len(whole["records"])
    assert timed == []


def test_a_run_of_another_machine_is_not_resumed(run):
    path = run(shapes=TINY.shapes[:1], op="delta_rule")
    path.write_text(json.dumps(read(path) | {"device": "another machine"}))
    with pytest.raises(ValueError, match="cannot be resumed: its device is another machine"):
        run(resume=True)


def test_what_is_no_result_is_not_resumed(run, tmp_path):
    (tmp_path / "ops.json").write_text("[]")
    with pytest.raises(ValueError, match="no result of rankone bench ops"):
        run(resume=True)


def test_shapes_beyond_the_time_are_left_out_and_told(run, capsys):
    result = read(run(minutes=1e-9, op="delta_rule"))
    assert result["records"] == []
    assert {r["why"] for r in result["left_out"]} == {"the time was up"}
    assert "nothing was timed" in capsys.readouterr().out


def test_what_takes_too_long_is_left_out_and_told(run):
    lengths = (16, 32, 64)
    shapes = tuple(TINY.shapes[0]._replace(T=T) for T in lengths)
    result = read(run(shapes=shapes, pass_seconds=0.0, op="delta_rule"))
    assert {r["T"] for r in result["records"]} == set(lengths[:2])
    assert {r["T"] for r in result["left_out"]} == {64}
    assert all("is to be expected" in r["why"] for r in result["left_out"])


def test_attention_is_left_out_beyond_its_longest(run):
    result = read(run(longest_attention=48, op="linear_attention"))
    assert {r["T"] for r in result["records"] if r["impl"] == "sdpa"} == {48}
    assert [(r["impl"], r["T"]) for r in result["left_out"]] == [("sdpa", 96)]


def test_an_implementation_can_be_kept_to_one_shape(run):
    result = read(run(only_at=(("sdpa", TINY.shapes[0]),), op="linear_attention"))
    assert {r["T"] for r in result["records"] if r["impl"] == "sdpa"} == {48}
    assert result["left_out"] == []


def test_the_plot_is_drawn_and_can_be_drawn_again(run, monkeypatch):
    monkeypatch.setattr("rankone.bench.plots.plot", plot)
    path = run()
    picture = path.with_suffix(".png")
    first = picture.read_bytes()
    assert first.startswith(b"\x89PNG")
    picture.unlink()
    before = path.read_bytes()
    assert module.bench(redraw=path) == path
    assert picture.read_bytes() == first
    assert path.read_bytes() == before


def test_without_matplotlib_there_is_a_message_and_no_plot(run, monkeypatch, capsys):
    monkeypatch.setattr(module.provenance, "installed_version", lambda package: None)
    path = run(op="delta_rule")
    assert not path.with_suffix(".png").exists()
    assert "no plot without matplotlib" in capsys.readouterr().out


def test_neither_numba_nor_matplotlib_is_needed(tmp_path):
    script = (
        "import sys; sys.modules |= dict.fromkeys(('numba', 'matplotlib', 'safetensors')); "
        "import rankone.bench.ops; from rankone.cli import main; "
        "sys.exit(main(['bench', 'ops', '--minutes', '-1']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr == "rankone: error: minutes must be positive, got -1.0\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": "attention"}, "op must be one of all, linear_attention, delta_rule"),
        ({"minutes": 0.0}, "minutes must be positive"),
    ],
)
def test_wrong_options_are_refused(run, options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)


@pytest.mark.parametrize("plan", [CPU, GPU, QUICK_CPU, QUICK_GPU])
def test_plans_name_what_there_is(plan):
    known = {*OURS, *PEERS}
    assert set(plan.impls) <= known
    assert len(set(plan.shapes)) == len(plan.shapes)
    assert {impl for impl, _ in plan.only_at} <= set(plan.impls)
    assert {shape for _, shape in plan.only_at} <= set(plan.shapes)
    assert plan.dtype in parity.LIMITS


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what a process holds")
def test_memory_on_the_cpu_counts_inputs_and_what_is_made_of_them():
    shape = TINY.shapes[0]._replace(T=4096)
    case = Case("delta_rule", shape, torch.float32, torch.device("cpu"))
    bound = bind(find("chunked", case, decay=False), case.inputs(decay=False))
    inputs = sum(x.nbytes for name, x in bound.tensors.items() if name != "d_o")
    forward = peak_gib(case, bound, "forward")
    both = peak_gib(case, bound, "forward_backward")
    assert forward is not None
    assert both is not None
    assert inputs + NOISE < forward * 2**30 < both * 2**30


@pytest.mark.gpu
def test_on_a_gpu_there_are_times_of_the_host_and_memory(run, monkeypatch):
    monkeypatch.setattr("rankone.bench.measure.peak_gib", peak_gib)
    result = read(run(device="cuda", dtype=torch.bfloat16, impls=("triton", "chunked", "fla")))
    assert result["records"]
    for record in result["records"]:
        assert record["device"] == "cuda"
        assert record["host_ms"] > 0
        assert record["peak_gib"] > 0
