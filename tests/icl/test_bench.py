"""The benchmark measures what it says, and only after the implementations agreed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rankone.icl import bench as module
from rankone.icl.bench import Plan, measure, plot
from rankone.icl.contest import Contest, ParityError, token_step
from rankone.icl.model import KINDS, LinearTransformer
from rankone.progress import Narrator

CPU = torch.device("cpu")
TINY = Plan(
    layers=(1, 2),
    seeds=1,
    batch=8,
    context=12,
    contexts=(12, 24),
    contexts_layers=1,
    contexts_batch=4,
    rounds=(1, 1),
)


def contest(kind: str = "full", impl: str = "reference") -> Contest:
    return Contest(kind, 2, 12, 8, 1, CPU, impl)


@pytest.fixture(scope="module")
def records() -> list[dict[str, object]]:
    with Narrator(quiet=True) as narrator:
        return measure(TINY, CPU, narrator)


def test_every_case_has_every_implementation_with_and_without_drawing(records):
    steps = [record for record in records if record["measure"] == "step"]
    found = {(r["kind"], r["layers"], r["impl"], r["drawing"]) for r in steps}
    assert found == {
        (kind, layers, impl, drawing)
        for kind in KINDS
        for layers in TINY.layers
        for impl in ("token", "gram", "fused_cpu")
        for drawing in (False, True)
    }
    assert len(steps) == len(found)


def test_parity_of_every_case_comes_before_the_first_time(records):
    measures = [record["measure"] for record in records]
    first_time = measures.index("step")
    assert "parity" not in measures[first_time:]
    cases = {(r["kind"], r["layers"]) for r in records[:first_time]}
    assert len(cases) == len(KINDS) * len(TINY.layers)


def test_a_disagreement_is_an_error_and_no_time(monkeypatch):
    honest = Contest.fused_step

    def wrong(self, batch):
        loss, grad = honest(self, batch)
        return loss, 1.01 * grad

    monkeypatch.setattr(Contest, "fused_step", wrong)
    with pytest.raises(ParityError, match="gradient, fused and reference"):
        contest().parity()


@pytest.mark.parametrize("kind", KINDS)
def test_the_token_step_is_the_models_token_forward(kind):
    case = contest(kind)
    prompts = case.tokens(0)
    got = token_step(kind, case.p, case.q, prompts).prediction
    for member in range(case.members):
        model = LinearTransformer.from_parameters(kind, case.p[member], case.q[member], 10)
        torch.testing.assert_close(got[member], model(prompts.tokens[member]))


def test_prompts_too_large_for_memory_are_left_out(monkeypatch):
    monkeypatch.setattr(module, "TOKEN_MEMORY", 0)
    gram_steps, token_steps = module._longer_prompts(TINY, CPU, "reference")
    assert [case.context for _, _, case in gram_steps] == list(TINY.contexts)
    assert not token_steps


def test_the_plot_is_a_png(records):
    assert plot(records, "a machine").startswith(b"\x89PNG")


def test_a_run_prints_tables_and_writes_a_stamped_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "QUICK", replace(TINY, layers=(1,), kinds=("diag",)))
    monkeypatch.chdir(tmp_path)
    path = module.bench(out=None, device="cpu", quick=True)
    assert path == Path("runs/icl-cpu-quick.json")
    content = json.loads(path.read_text())
    stamp = {"command", "device", "versions", "date", "commit", "seconds", "records"}
    assert stamp <= content.keys()
    assert all(not isinstance(v, dict | list) for r in content["records"] for v in r.values())
    assert path.with_suffix(".png").exists()
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("token", "gram", "fused", "ratio", "examples"))


def test_a_busy_machine_is_told(tmp_path, monkeypatch, capsys):
    seconds = iter((0.0, 1e6))
    monkeypatch.setattr(module, "busy_seconds", lambda: next(seconds))
    monkeypatch.setattr(module, "QUICK", replace(TINY, layers=(1,), kinds=("diag",)))
    path = module.bench(out=tmp_path / "o.json", device="cpu", quick=True)
    assert json.loads(path.read_text())["other_cores"] > 1
    assert "Do not trust these times" in capsys.readouterr().out


def test_results_of_a_checkout_go_into_its_benchmarks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert module._default_path(gpu=False, quick=False) == Path("icl-cpu.json")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "src/rankone").mkdir(parents=True)
    assert module._default_path(gpu=True, quick=False) == Path("benchmarks/results/icl-gpu.json")


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="auto, cpu, cuda, got 'tpu'"):
        module.bench(out=None, device="tpu", quick=True)
