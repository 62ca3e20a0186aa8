import math
from dataclasses import replace

import pytest
import torch

from rankone.icl import training
from rankone.icl.ensemble import Ensemble, Run
from rankone.icl.training import (
    CHECK_EVERY,
    PAPER,
    SMALLEST_LIMIT,
    Recipe,
    State,
    look,
    train,
    winners,
)
from rankone.tasks.noise import Uniform

NOISES = {"sigma_5": Uniform(0, 5)}
RECIPE = Recipe(steps=30, batch=64, heats=2, heat_steps=20, heat_batch=32)
DIAG, FULL = Run("diag", 2, "sigma_5", 0), Run("full", 1, "sigma_5", 0)


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr(training, "CHECK_EVERY", 10)


def make(*runs, **options):
    return Ensemble(list(runs), NOISES, **{"dim": 3, "context": 8, "impl": "reference", **options})


def test_training_lowers_the_loss():
    ensemble = make(DIAG, FULL)
    state = train(ensemble, replace(RECIPE, steps=150))
    prompts = ensemble.batch(2000, step=-1)
    before, _ = ensemble.loss_and_grad(ensemble.initial(RECIPE.initial_scale), prompts)
    after, _ = ensemble.loss_and_grad(state.table, prompts)
    assert bool((after < 0.75 * before).all())
    assert state.step == 150
    assert len(state.history) == 15
    assert state.restarts.tolist() == [0, 0]


def test_the_first_update_is_adams():
    """With fresh moments Adam moves every parameter by the learning rate against its gradient."""
    ensemble = make(DIAG)
    recipe = replace(RECIPE, warmup=0.0, clip=None, schedule="constant", spikes=())
    state = State.fresh(ensemble, recipe)
    before = state.table.clone()
    _, grad = ensemble.loss_and_grad(before, ensemble.batch(64, 0), state.limit(recipe.limit))
    train(ensemble, recipe, state, until=1)
    expected = before - recipe.learning_rate * grad.sign()
    torch.testing.assert_close(state.table, expected, rtol=1e-4, atol=1e-5)


def test_a_run_is_trained_alike_beside_others_and_alone():
    together, alone = make(DIAG, FULL), make(DIAG)
    row = together.runs.index(DIAG)
    a = train(together, RECIPE).table[row, : alone.width]
    torch.testing.assert_close(a, train(alone, RECIPE).table[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("at", [1, 10, 17])
def test_training_in_two_parts_is_training(at):
    ensemble = make(DIAG, FULL)
    whole = train(ensemble, RECIPE)
    parts = train(ensemble, RECIPE, train(ensemble, RECIPE, until=at))
    assert torch.equal(whole.table, parts.table)
    assert whole.history == parts.history


def test_a_member_that_diverges_is_noticed_restarted_and_disturbs_nobody():
    ensemble = make(DIAG, FULL)
    recipe = replace(RECIPE, limit=math.inf, clip=None)
    calm = train(ensemble, recipe)
    state = State.fresh(ensemble, recipe)
    wild = ensemble.runs.index(DIAG)
    state.rate[wild] = 1e6
    heard = []
    train(ensemble, recipe, state, progress=lambda step, messages: heard.extend(messages))
    other = ensemble.runs.index(FULL)
    assert state.restarts[wild] >= 1
    assert state.restarts[other] == 0
    assert len(heard) == int(state.restarts[wild])
    assert heard[0].startswith(f"{DIAG.name} diverged before step 10")
    assert float(state.rate[wild]) == 1e6 / 2 ** int(state.restarts[wild])
    assert bool(torch.isfinite(state.table).all())
    assert torch.equal(state.table[other], calm.table[other])
    assert [losses[other] for losses in state.history] == [l[other] for l in calm.history]


def test_a_broken_row_goes_back_to_its_last_healthy_parameters():
    ensemble = make(DIAG, FULL)
    state = State.fresh(ensemble, RECIPE)
    good = state.table.clone()
    state.updates += 2 * CHECK_EVERY
    state.table += 1
    state.mean += 1
    state.broken[0] = True
    assert look(state, 3) == [0]
    assert torch.equal(state.table[0], good[0])
    assert torch.equal(state.table[1], good[1] + 1)
    assert torch.equal(state.good[1], good[1] + 1)
    assert state.mean[0].abs().sum() == 0
    assert state.mean[1].abs().sum() > 0
    assert state.rate.tolist() == [0.5, 0.5]
    assert state.restarts.tolist() == [1, 0]
    assert not state.broken.any()
    state.broken[0] = True  # at the very next look: its parameters were never healthy
    assert look(state, 3) == [0]
    assert torch.equal(state.table[0], good[0] / 2)


def test_a_loss_above_that_of_predicting_nothing_is_divergence():
    ensemble = make(DIAG, FULL)
    state = State.fresh(ensemble, RECIPE)
    state.smooth[1] = math.log(3.1)
    assert look(state, 3) == [1]
    state.smooth[0] = math.nan
    assert look(state, 3) == [0]


def test_a_gradient_that_is_not_finite_moves_nothing():
    ensemble = make(DIAG, FULL)
    state = State.fresh(ensemble, RECIPE)
    before = state.table.clone()
    grad = torch.ones_like(before)
    grad[0, 0] = math.nan
    training.update(state, RECIPE, torch.tensor([1.0, 1.0]), grad)
    assert state.broken.tolist() == [True, False]
    assert torch.equal(state.table[0], before[0])
    assert not torch.equal(state.table[1], before[1])
    assert bool(torch.isfinite(state.mean).all())


def test_the_best_start_of_every_run_wins():
    contest = make(DIAG, FULL, starts=3)
    state = State.fresh(contest, RECIPE)
    state.table[0] *= math.nan
    state.table[4] *= 10
    chosen = winners(contest, RECIPE, state)
    prompts = contest.batch(8192, -1, RECIPE.spikes, RECIPE.share)
    loss, _ = contest.loss_and_grad(state.table, prompts, state.limit(RECIPE.last_limit))
    best = [1 + int(loss[1:3].argmin()), 3 + int(loss[3:].argmin())]
    assert torch.equal(chosen, state.table[best])


def test_the_learning_rate_rises_and_falls_on_a_cosine():
    recipe = Recipe(steps=1000, learning_rate=0.1, warmup=0.1, bend=1.0)
    rates = [recipe.rate(step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.001)
    assert max(rates) == pytest.approx(0.1, rel=1e-3)
    assert rates.index(max(rates)) in range(98, 102)
    assert rates[550] == pytest.approx(0.05, rel=1e-2)
    assert 0 < rates[-1] < 1e-6
    assert rates[:100] == sorted(rates[:100])
    assert rates[101:] == sorted(rates[101:], reverse=True)


def test_a_bent_cosine_is_a_power_of_the_cosine():
    recipe = Recipe(steps=1000, learning_rate=1.0, warmup=0.1, bend=1.0)
    bent = replace(recipe, bend=2.0)
    for step in (300, 550, 900):
        assert bent.rate(step) == pytest.approx(recipe.rate(step) ** 2)


def test_seeds_of_full_models_take_learning_rates_in_turn():
    full = [FULL._replace(seed=seed) for seed in range(3)]
    state = State.fresh(make(DIAG, *full), replace(RECIPE, full_rates=(0.5, 0.7)))
    assert state.rate.tolist() == pytest.approx([1.0, 0.5, 0.7, 0.5])


def test_the_limit_of_a_row_follows_its_running_loss():
    state = State.fresh(make(DIAG, FULL), RECIPE)
    state.smooth[0], state.smooth[1] = math.log(0.02), -100.0
    assert state.limit(100.0).tolist() == pytest.approx([2.0, SMALLEST_LIMIT])
    assert state.limit(math.inf).tolist() == [math.inf, math.inf]


def test_limit_and_clip_grow_geometrically():
    recipe = Recipe(steps=100, clip=2.0, last_clip=200.0, limit=10.0, last_limit=1e5)
    assert [recipe.clip_at(s) for s in (0, 50, 100)] == pytest.approx([2, 20, 200])
    assert [recipe.limit_at(s) for s in (0, 50, 100)] == pytest.approx([10, 1e3, 1e5])
    assert replace(recipe, clip=None).clip_at(50) is None
    assert replace(recipe, limit=math.inf).limit_at(50) == math.inf


def test_the_papers_recipe_is_plain_adam():
    assert (PAPER.steps, PAPER.batch, PAPER.learning_rate) == (200_000, 2048, 1e-4)
    assert {PAPER.rate(step) for step in (0, 1000, 199_999)} == {1e-4}
    assert PAPER.clip_at(5) is None
    assert PAPER.limit_at(5) == math.inf
    assert (PAPER.spikes, PAPER.heats, PAPER.normalise) == ((), 1, False)


def test_a_state_is_saved_and_loaded_whole(tmp_path):
    ensemble = make(DIAG, FULL)
    state = train(ensemble, RECIPE, until=12)
    state.save(tmp_path / "s", "mine")
    again = State.load(tmp_path / "s", "mine", tuple(state.table.shape), ensemble.device)
    assert (again.step, again.history) == (12, state.history)
    for name, value in vars(state).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, getattr(again, name)), name
    with pytest.raises(ValueError, match="another configuration"):
        State.load(tmp_path / "s", "other", (1, 1), ensemble.device)


def test_a_state_of_another_table_is_refused(tmp_path):
    ensemble = make(DIAG, FULL)
    state = State.fresh(ensemble, RECIPE)
    state.save(tmp_path / "s", "mine")
    rows, width = state.table.shape
    with pytest.raises(ValueError, match=rf"must have shape \({rows}, {width + 1}\)"):
        State.load(tmp_path / "s", "mine", (rows, width + 1), ensemble.device)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"heats": 0}, "heats must be at least 1, got 0"),
        ({"learning_rate": math.nan}, "learning_rate must be positive, got nan"),
        ({"limit": 0.0}, "limit must be positive, got 0.0"),
        ({"schedule": "linear"}, "one of cosine, constant, got 'linear'"),
        ({"full_rates": ()}, "full_rates must hold at least one factor"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**change)


def test_a_file_that_is_no_state_is_refused(tmp_path):
    from rankone.storage import write_tensors

    facts = {"signature": "mine", "step": "1", "history": "[]"}
    write_tensors(tmp_path / "s", {"table": torch.zeros(1, 1)}, facts)
    with pytest.raises(ValueError, match="not a training checkpoint"):
        State.load(tmp_path / "s", "mine", (1, 1), torch.device("cpu"))
