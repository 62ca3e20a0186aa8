"""The laboratory on an NVIDIA GPU: what training and evaluation give there."""

import json
from dataclasses import replace

import pytest
import torch

from rankone.icl.ensemble import Ensemble, Run
from rankone.icl.evaluation import make_problems, score_baselines, score_models, tune
from rankone.icl.fitting import fit
from rankone.icl.model import LinearTransformer
from rankone.icl.reproduce import reproduce
from rankone.icl.training import Recipe, train
from rankone.tasks.noise import Categorical, Uniform

pytestmark = pytest.mark.gpu

NOISES = {"a": Uniform(0, 5), "b": Categorical((1, 3))}
RUNS = [
    Run(kind, layers, noise, seed)
    for kind in ("full", "diag", "gd++")
    for layers in (1, 3)
    for noise in NOISES
    for seed in (0, 1)
]
SMALL = Recipe(steps=30, batch=256, heats=2, heat_steps=20, heat_batch=64)


def test_fused_training_follows_the_reference():
    """The same prompts and starts; twenty steps stay together up to rounding."""
    ends = {}
    for impl in ("fused_gpu", "reference"):
        ensemble = Ensemble(RUNS, NOISES, device="cuda", impl=impl)
        ends[impl] = train(ensemble, replace(SMALL, heats=1), until=20)
    ours, truth = ends["fused_gpu"], ends["reference"]
    assert torch.allclose(ours.smooth, truth.smooth, atol=2e-3)
    assert torch.allclose(ours.table, truth.table, atol=5e-3)
    assert not torch.equal(truth.table, ensemble.initial(SMALL.initial_scale))


def test_training_gives_equal_bits_twice_and_after_an_interruption(tmp_path):
    whole = fit(RUNS, NOISES, SMALL, device="cuda")

    def stop(stage, step, steps, messages):
        if stage == "training" and step == 11:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        fit(RUNS, NOISES, SMALL, device="cuda", checkpoints=tmp_path, save_every=0, progress=stop)
    again = fit(RUNS, NOISES, SMALL, device="cuda", checkpoints=tmp_path)
    for run in RUNS:
        for name, value in whole.models[run].state_dict().items():
            assert torch.equal(value, again.models[run].state_dict()[name]), run.name


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_of_training_never_waits_for_the_gpu():
    ensemble = Ensemble(RUNS, NOISES, device="cuda")
    state = train(ensemble, SMALL, until=3)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(ensemble, SMALL, state, until=20)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_scores_on_the_gpu_are_those_of_the_cpu():
    sizes = {"dim": 10, "context": 20, "sequences": 3000, "seed": 3}
    (there,) = make_problems({"a": NOISES["a"]}, device="cuda", **sizes)
    parts = {name: getattr(there, name).cpu() for name in ("gram", "weights", "sigma")}
    here = replace(there, **parts)
    tuning = tune(here)
    model = LinearTransformer(kind="full", layers=4, dim=10, scale=0.05).double()
    run = Run("full", 4, "a", 0)
    got, want = (
        score_baselines(problem, tuning, problem.noise) + score_models(problem, {run: model})
        for problem in (there, here)
    )
    for mine, theirs in zip(got, want, strict=True):
        assert mine["model"] == theirs["model"]
        for key in ("loss", "adjusted_loss", "standard_error"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-9, abs=1e-12)


@pytest.mark.filterwarnings("ignore")  # matplotlib's of a machine that has no fonts of its own
def test_a_reproduction_runs_from_beginning_to_end(tmp_path):
    page = reproduce(preset="smoke", out=tmp_path / "out", device="cuda", quiet=True)
    assert page.is_file()
    result = json.loads((tmp_path / "out/table1.json").read_text())
    assert "NVIDIA" in result["device"]
    assert {"training", "evaluation", "profiles", "figures"} <= result["stages"].keys()
    full = {
        row["noise"]: row["adjusted_loss"]
        for row in result["records"]
        if (row["model"], row["layers"]) == ("full", 2)
    }
    assert 0.2 < full["sigma_5"] < 0.5
