import pytest
import torch

from rankone.icl.ensemble import Ensemble, Row, Run
from rankone.tasks.noise import Categorical, Uniform

NOISES = {"sigma_5": Uniform(0, 5), "set_1_3": Categorical((1, 3))}
RUNS = [
    Run("full", 2, "sigma_5", 0),
    Run("full", 2, "set_1_3", 1),
    Run("diag", 3, "sigma_5", 1),
    Run("gd++", 2, "set_1_3", 0),
    Run("full", 1, "sigma_5", 0),
]


def make(runs=RUNS, **options):
    return Ensemble(runs, NOISES, **{"dim": 3, "context": 8, "impl": "reference", **options})


def row_of(ensemble, table, run, start=0):
    return table[ensemble.rows.index(Row(run, start))]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
def test_the_loss_is_that_of_the_raw_models_on_the_raw_prompts(heads, normalise):
    ensemble = make(heads=heads, normalise=normalise)
    table = ensemble.initial(0.3 if normalise else 0.05)
    loss, grad = ensemble.loss_and_grad(table, ensemble.batch(64, 3))
    assert grad.shape == table.shape
    raw = make(heads=heads, normalise=False).batch(64, 3)
    assert raw.scale.tolist() == [1.0] * 4
    models = ensemble.models(table)
    assert set(models) == set(RUNS)
    for group in ensemble.groups:
        for row, stream in zip(ensemble.rows[group.rows], group.stream.tolist(), strict=True):
            model = models[row.run]
            assert (model.kind, model.layers, model.heads) == (row.run.kind, row.run.layers, heads)
            with torch.no_grad():
                weights = model.implicit_weights(raw.gram[stream].double())
            expected = (weights - raw.weights[stream]).square().sum(1).mean() / 2
            assert float(row_of(ensemble, loss, row.run)) == pytest.approx(
                float(expected), rel=1e-4
            )


def test_a_run_reads_the_prompts_of_its_noise_and_seed():
    ensemble = make()
    prompts = ensemble.batch(16, 0)
    assert prompts.gram.shape == (4, 16, 4, 4)
    for group in ensemble.groups:
        for row, stream in zip(ensemble.rows[group.rows], group.stream.tolist(), strict=True):
            alone = make([row.run])
            assert torch.equal(alone.batch(16, 0).gram[0], prompts.gram[stream])


def test_steps_and_seeds_have_prompts_of_their_own():
    ensemble = make()
    first, again, other = ensemble.batch(4, 0), ensemble.batch(4, 0), ensemble.batch(4, 1)
    assert torch.equal(first.gram, again.gram)
    assert not torch.equal(first.gram, other.gram)
    assert not torch.equal(first.weights[0], first.weights[2])


@pytest.mark.parametrize("starts", [1, 3])
def test_initial_parameters_do_not_depend_on_the_runs_beside_them(starts):
    together = make(starts=starts)
    table = together.initial(0.3)
    for run in RUNS:
        alone = make([run], starts=starts)
        own = alone.initial(0.3)
        for start in range(starts):
            row = row_of(together, table, run, start)
            assert torch.equal(row[: alone.width], own[start])
            assert bool((row[alone.width :] == 0).all())


def test_starts_differ_in_their_initial_parameters():
    table = make([RUNS[0]], starts=3).initial(0.3)
    assert len({tuple(row.tolist()) for row in table}) == 3
    assert torch.equal(table[:1], make([RUNS[0]]).initial(0.3))


def test_initial_operators_have_the_given_scale():
    runs = [Run("full", 5, "sigma_5", seed) for seed in range(20)]
    table = Ensemble(runs, NOISES, dim=10, context=20).initial(0.3)
    assert float(table.std()) * 11**0.5 == pytest.approx(0.3, rel=0.02)


def test_rows_of_a_kind_and_depth_are_neighbours_and_runs_are_not_repeated():
    ensemble = make([*RUNS, *RUNS])
    assert sorted(ensemble.runs) == sorted(RUNS)
    covered = [row for group in ensemble.groups for row in ensemble.rows[group.rows]]
    assert covered == ensemble.rows
    assert len({(group.kind, group.layers) for group in ensemble.groups}) == len(ensemble.groups)


def test_names_are_file_names():
    assert Run("gd++", 3, "set_1_3", 2).name == "gdpp-3-set_1_3-seed2"
    assert Row(Run("full", 1, "sigma_5", 0), 2).name == "full-1-sigma_5-seed0-start2"


def test_bad_ensembles_are_refused():
    with pytest.raises(ValueError, match="at least one run, got none"):
        make([])
    with pytest.raises(ValueError, match="no noise distribution given for sigma_9"):
        make([Run("full", 1, "sigma_9", 0)])
