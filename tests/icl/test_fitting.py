import math
import signal
from dataclasses import replace

import pytest
import torch

from rankone.icl import training
from rankone.icl.ensemble import Run
from rankone.icl.fitting import fit
from rankone.icl.training import Recipe
from rankone.tasks.noise import Categorical, Uniform

NOISES = {"sigma_5": Uniform(0, 5), "set_1_3": Categorical((1, 3))}
RUNS = [Run("diag", 2, "sigma_5", 0), Run("full", 2, "set_1_3", 1)]
RECIPE = Recipe(steps=30, batch=64, heats=2, heat_steps=20, heat_batch=32)


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr(training, "CHECK_EVERY", 10)


@pytest.fixture(scope="module")
def whole():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "CHECK_EVERY", 10)
        return fit(RUNS, NOISES, RECIPE)


def interrupt(at, how):
    def progress(stage, step, steps, messages):
        if (stage, step) == at:
            how()

    return progress


def stop():
    raise KeyboardInterrupt


def assert_same(a, b):
    assert a.restarts == b.restarts
    assert a.history == b.history
    for run in RUNS:
        assert torch.equal(a.models[run].p, b.models[run].p)
        assert torch.equal(a.models[run].q, b.models[run].q)


@pytest.mark.parametrize(
    "points",
    [
        [("heats", 1)],
        [("heats", 20)],
        [("training", 1)],
        [("training", 30)],
        [("heats", 9), ("heats", 10), ("training", 10), ("training", 17)],
    ],
    ids=str,
)
def test_interrupted_and_resumed_is_bit_for_bit_uninterrupted(points, whole, tmp_path):
    for at in points:
        with pytest.raises(KeyboardInterrupt):
            fit(
                RUNS,
                NOISES,
                RECIPE,
                checkpoints=tmp_path,
                save_every=0.0,
                progress=interrupt(at, stop),
            )
        assert any(tmp_path.iterdir())
    seen = []
    resumed = fit(
        RUNS,
        NOISES,
        RECIPE,
        checkpoints=tmp_path,
        progress=lambda stage, step, steps, messages: seen.append((stage, step)),
    )
    assert points[-1] not in seen, "what was done is not done again"
    assert_same(resumed, whole)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("at", [("heats", 13), ("training", 7), ("training", 30)], ids=str)
def test_a_signal_stops_between_two_steps_and_loses_nothing(at, name, whole, tmp_path):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        fit(
            RUNS,
            NOISES,
            RECIPE,
            checkpoints=tmp_path,
            progress=interrupt(at, lambda: signal.raise_signal(number)),
        )
    assert signal.getsignal(number) is before
    assert (tmp_path / f"{at[0]}.safetensors").exists()
    seen = []
    resumed = fit(
        RUNS,
        NOISES,
        RECIPE,
        checkpoints=tmp_path,
        progress=lambda stage, step, steps, messages: seen.append((stage, step)),
    )
    assert at not in seen
    assert_same(resumed, whole)


def test_a_finished_training_is_not_done_again(whole, tmp_path):
    fit(RUNS, NOISES, RECIPE, checkpoints=tmp_path)
    again = fit(RUNS, NOISES, RECIPE, checkpoints=tmp_path, progress=lambda *_: pytest.fail("work"))
    assert_same(again, whole)


def test_a_fit_has_everything_for_every_run(whole):
    assert set(whole.models) == set(whole.restarts) == set(whole.history) == set(RUNS)
    assert all(len(losses) == 3 for losses in whole.history.values())
    assert whole.seconds > 0


@pytest.mark.parametrize(
    "other",
    [
        {"recipe": replace(RECIPE, learning_rate=0.01)},
        {"noises": NOISES | {"sigma_5": Uniform(0, 4)}},
        {"runs": RUNS[:1]},
        {"context": 21},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_checkpoint_of_another_configuration_is_refused_and_kept(other, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(
            RUNS,
            NOISES,
            RECIPE,
            checkpoints=tmp_path,
            save_every=0.0,
            progress=interrupt(("heats", 2), stop),
        )
    file = tmp_path / "heats.safetensors"
    content = file.read_bytes()
    arguments = {"runs": RUNS, "noises": NOISES, "recipe": RECIPE} | other
    with pytest.raises(ValueError, match=r"heats\.safetensors belongs to another configuration"):
        fit(**arguments, checkpoints=tmp_path)
    assert file.read_bytes() == content


def test_a_truncated_checkpoint_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(
            RUNS,
            NOISES,
            RECIPE,
            checkpoints=tmp_path,
            save_every=0.0,
            progress=interrupt(("training", 2), stop),
        )
    file = tmp_path / "training.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"training\.safetensors: truncated"):
        fit(RUNS, NOISES, RECIPE, checkpoints=tmp_path)


def test_divergence_is_counted_and_told():
    wild = replace(RECIPE, learning_rate=1e4, limit=math.inf, clip=None, warmup=0.0, heats=1)
    fitted = fit(RUNS, NOISES, wild)
    assert all(count >= 1 for count in fitted.restarts.values())
    assert len(fitted.messages) == sum(fitted.restarts.values())
    for run in RUNS:
        assert any(message.startswith(run.name) for message in fitted.messages)
        assert bool(torch.isfinite(fitted.models[run].p).all())


def test_what_was_told_before_an_interruption_is_not_forgotten(tmp_path):
    wild = replace(RECIPE, learning_rate=1e4, limit=math.inf, clip=None, warmup=0.0)
    whole = fit(RUNS, NOISES, wild)
    assert any("-start1" in message for message in whole.messages)  # the heats' are there too
    with pytest.raises(KeyboardInterrupt):
        fit(
            RUNS,
            NOISES,
            wild,
            checkpoints=tmp_path,
            save_every=0.0,
            progress=interrupt(("training", 20), stop),
        )
    assert fit(RUNS, NOISES, wild, checkpoints=tmp_path).messages == whole.messages
