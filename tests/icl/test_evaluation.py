import pytest
import torch

from rankone.icl import evaluation
from rankone.icl.ensemble import Run
from rankone.icl.evaluation import (
    Problem,
    Tuning,
    expected_problem,
    make_problems,
    profile,
    score_baselines,
    score_models,
    typical,
)
from rankone.icl.model import LinearTransformer
from rankone.tasks.noise import Categorical, Fixed, Uniform
from rankone.tasks.regression import NoisyRegression

SIZES = {"dim": 10, "context": 20, "seed": 5, "device": "cpu"}


@pytest.fixture(scope="module")
def problem() -> Problem:
    (made,) = make_problems({"sigma_5": Uniform(0, 5)}, sequences=3000, **SIZES)
    return made


def test_a_model_is_scored_after_every_layer(problem):
    run = Run("diag", 2, "sigma_5", 4)
    model = LinearTransformer(kind="diag", layers=2, dim=10, scale=0.1).double()
    records = score_models(problem, {run: model})
    assert [record["read_after"] for record in records] == [0, 1, 2]
    with torch.no_grad():
        weights = model.implicit_weights(problem.gram, every_layer=True)
    loss = (weights - problem.weights[:, None]).square().sum(2).mean(0) / 2
    assert [record["loss"] for record in records] == pytest.approx(loss.tolist())
    oracle = float(problem.oracle_loss.mean())
    for record in records:
        assert record["adjusted_loss"] == pytest.approx(record["loss"] - oracle)
        assert record["standard_error"] > 0
        assert (record["model"], record["layers"], record["seed"]) == ("diag", 2, 4)
    assert "published_standard_error" in records[-1]


def test_models_scored_together_have_the_records_of_each_alone(problem, monkeypatch):
    models = {
        Run(kind, layers, "sigma_5", seed): LinearTransformer(
            kind=kind, layers=layers, dim=10, scale=0.05, generator=seed
        ).double()
        for seed in (0, 1, 2)
        for layers in (1, 3)
        for kind in ("diag", "full")
    }
    together = score_models(problem, models)
    alone = [record for run in models for record in score_models(problem, {run: models[run]})]
    assert together == alone
    monkeypatch.setitem(evaluation.AT_ONCE, "cpu", 3000 * 4 * 10 * 2)  # two deep models at a time
    assert score_models(problem, models) == alone


def test_a_model_that_explodes_has_no_loss_and_no_warning(problem):
    model = LinearTransformer(kind="full", layers=7, dim=10, scale=1e9).double()
    record = score_models(problem, {Run("full", 7, "sigma_5", 0): model})[-1]
    assert record["loss"] is None
    assert record["adjusted_loss"] is None
    assert record["published_standard_error"] is None


def test_baselines_are_in_their_order(problem):
    records = score_baselines(problem, Tuning(25 / 3, 13.7, 1.31), problem.noise)
    loss = {record["model"]: record["adjusted_loss"] for record in records}
    assert loss["oracle"] == 0
    assert 0 < loss["bayes"] < loss["tunedrr"] < loss["adarr"] < loss["constrr"]


def test_the_published_error_is_that_of_one_query_a_sequence():
    task = NoisyRegression(dim=10, context=20, noise=Categorical((1, 3)))
    gram, weights, sigma = task.sample_gram(100_000, generator=8, dtype=torch.float64)
    problem = Problem("set_1_3", task.noise, 20, gram, weights, sigma)
    error = -weights  # the predictor that says 0
    x = torch.randn(100_000, 10, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    once = ((error * x).sum(1) ** 2 - (problem.oracle_error * x).sum(1) ** 2) / 2
    assert problem.published_errors(error[None]) == pytest.approx(
        [float(once.std()) / 100_000**0.5], rel=0.03
    )


def test_problems_share_all_but_the_noise():
    a, b = make_problems({"a": Fixed(1), "b": Fixed(3)}, sequences=10, **SIZES)
    assert torch.equal(a.weights, b.weights)
    assert torch.equal(a.gram[:, :-1, :-1], b.gram[:, :-1, :-1])
    assert not torch.equal(a.gram, b.gram)


def test_the_typical_record_is_that_of_the_median_draw():
    draws = [
        [{"adjusted_loss": a, "standard_error": e}, {"adjusted_loss": b, "standard_error": e}]
        for a, b, e in [(0.3, None, 1), (9.0, 0.2, 2), (0.1, 0.4, 3)]
    ]
    first, second = typical(draws)
    assert (first["adjusted_loss"], first["standard_error"]) == (0.3, 1)
    assert first["draws"] == [0.1, 0.3, 9.0]
    assert (second["adjusted_loss"], second["standard_error"]) == (0.4, 3)
    assert second["draws"] == [0.2, 0.4, None]


def test_errors_are_medians_over_the_draws_too():
    draws = [
        [{"adjusted_loss": a, "standard_error": e, "published_standard_error": p}]
        for a, e, p in [(0.4, 0.2, 0.3), (0.5, 0.05, 0.1), (9.0, 8.0, None)]
    ]
    (record,) = typical(draws)
    assert record["adjusted_loss"] == 0.5
    assert record["published_standard_error"] == 0.3
    assert record["relative_error"] == pytest.approx(0.5)
    (nothing,) = typical([[{"adjusted_loss": None, "standard_error": None}]])
    assert nothing["relative_error"] is None


def test_the_expectation_agrees_with_plain_prompts_where_there_is_no_tail(problem):
    """One layer does not explode: weighted and plain means estimate the same number."""
    sizes = SIZES | {"seed": 100}
    expected = expected_problem("sigma_5", Uniform(0, 5), sequences=20_480, **sizes)
    assert len(expected.gram) == len(expected.importance) == 20_480
    model = LinearTransformer.from_parameters(
        "gd++", torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[-0.025]]]), 10
    ).double()
    run = Run("gd++", 1, "sigma_5", 0)
    ours, plain = (score_models(p, {run: model})[-1] for p in (expected, problem))
    error = (ours["standard_error"] ** 2 + plain["standard_error"] ** 2) ** 0.5
    assert ours["adjusted_loss"] == pytest.approx(plain["adjusted_loss"], abs=4 * error)


def test_the_expectation_sees_what_plain_prompts_do_not(problem):
    """Eigenvalues above 100 occur once in a million prompts."""
    sizes = SIZES | {"seed": 100}
    expected = expected_problem("sigma_5", Uniform(0, 5), sequences=20_480, **sizes)
    top = torch.linalg.eigvalsh(expected.gram[:, :-1, :-1])[:, -1]
    assert int((top > 100).sum()) > 100
    assert float((expected.importance * (top > 100)).mean()) < 1e-5
    assert float(torch.linalg.eigvalsh(problem.gram[:, :-1, :-1])[:, -1].max()) < 100


def test_a_profile_is_scored_at_each_noise_level():
    model = LinearTransformer(kind="gd++", layers=2, dim=10).double()
    models = {Run("gd++", 2, "sigma_5", 0): model}
    for every_layer, count in ((False, 1), (True, 3)):
        parts = list(
            profile(
                "sigma_5",
                Uniform(0, 5),
                [0.0, 2.0],
                models,
                Tuning(25 / 3, 13.7, 1.31),
                every_layer=every_layer,
                sequences=500,
                **SIZES,
            )
        )
        assert [{record["sigma"] for record in part} for part in parts] == [{0.0}, {2.0}]
        assert all(len(part) == 5 + count for part in parts)
        constant = [r["adjusted_loss"] for part in parts for r in part if r["model"] == "constrr"]
        assert constant[0] == pytest.approx(0.931, rel=0.15)
        assert constant[1] == pytest.approx(0.146, rel=0.3)
