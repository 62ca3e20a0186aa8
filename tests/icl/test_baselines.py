import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge

from rankone.icl import (
    adaptive_ridge,
    bayes_ridge,
    constant_ridge,
    ols,
    oracle_ridge,
    tune_constant,
    tune_ridge,
    tuned_ridge,
)
from rankone.tasks.noise import Categorical, Fixed, Uniform
from rankone.tasks.regression import NoisyRegression


def prompts_and_grams(noise, *, dim=4, context=9, batch=6, seed=0):
    task = NoisyRegression(dim=dim, context=context, noise=noise)
    prompts = task.sample(batch, generator=seed, dtype=torch.float64)
    keys = prompts.tokens[:, :-1]
    return keys[:, :, :-1].numpy(), keys[:, :, -1].numpy(), prompts, keys.mT @ keys


def half_square(weights, truth):
    return (weights - truth).square().sum(1) / 2


def close(ours, theirs):
    np.testing.assert_allclose(ours.numpy(), np.stack(theirs), rtol=1e-9, atol=1e-9)


def test_ols_is_that_of_scikit_learn():
    x, y, _, gram = prompts_and_grams(Uniform(0, 2))
    fits = [LinearRegression(fit_intercept=False).fit(a, b) for a, b in zip(x, y, strict=True)]
    close(ols(gram), [fit.coef_ for fit in fits])


def test_ols_of_few_examples_is_the_one_of_minimum_norm():
    x, y, _, gram = prompts_and_grams(Uniform(0, 2), dim=6, context=3)
    weights = [np.linalg.pinv(a) @ b for a, b in zip(x, y, strict=True)]
    np.testing.assert_allclose(ols(gram).numpy(), np.stack(weights), rtol=1e-6, atol=1e-8)


def test_oracle_and_constant_ridge_are_those_of_scikit_learn():
    x, y, prompts, gram = prompts_and_grams(Uniform(0.5, 2))

    def ridge(variances):
        return [
            Ridge(alpha=float(v), fit_intercept=False).fit(a, b).coef_
            for a, b, v in zip(x, y, variances, strict=True)
        ]

    close(oracle_ridge(gram, prompts.sigma), ridge(prompts.sigma**2))
    close(constant_ridge(gram, 1.7), ridge([1.7] * len(x)))


def residual_variances(x, y):
    n, d = x.shape[1:]
    rss = [np.linalg.lstsq(a, b, rcond=None)[1][0] for a, b in zip(x, y, strict=True)]
    return [r / (n - d) for r in rss]


def test_adaptive_and_tuned_ridge_use_the_unbiased_residual_variance():
    x, y, _, gram = prompts_and_grams(Uniform(0.5, 2))
    estimates = residual_variances(x, y)

    def ridge(variances):
        return [
            np.linalg.solve(a.T @ a + v * np.eye(4), a.T @ b)
            for a, b, v in zip(x, y, variances, strict=True)
        ]

    close(adaptive_ridge(gram, 9), ridge(estimates))
    threshold = float(np.median(estimates))
    close(tuned_ridge(gram, 9, threshold, 1.3), ridge([1.3 * min(v, threshold) for v in estimates]))


@pytest.mark.parametrize("context", [3, 4])
def test_adaptive_ridge_needs_more_examples_than_features(context):
    gram = prompts_and_grams(Uniform(0, 2), context=context)[3]
    for predict in (
        lambda: adaptive_ridge(gram, context),
        lambda: tuned_ridge(gram, context, 1.0, 1.0),
        lambda: tune_ridge(gram, torch.zeros(6, 4), context),
    ):
        with pytest.raises(ValueError, match=f"more examples than features, got context={context}"):
            predict()


def test_bad_parameters_are_refused(unchecked):
    gram = prompts_and_grams(Uniform(0, 2))[3]
    with pytest.raises(ValueError, match="variance must be a number >= 0, got -1"):
        constant_ridge(gram, -1.0)
    with pytest.raises(ValueError, match="variance must be a number >= 0, got nan"):
        constant_ridge(gram, math.nan)
    with pytest.raises(ValueError, match="threshold must be a number >= 0"):
        tuned_ridge(gram, 9, -1.0, 1.0)
    with pytest.raises(ValueError, match="factor must be a number >= 0"):
        tuned_ridge(gram, 9, 1.0, -1.0)
    with pytest.raises(ValueError, match="context must be at least 1, got 0"):
        bayes_ridge(gram, 0, Uniform(0, 1))
    with pytest.raises(ValueError, match=r"gram must have shape \[B, d\+1, d\+1\]"):
        ols(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="gram must be finite"):
        ols(gram * math.nan)
    with pytest.raises(ValueError, match="variance must be a number >= 0"):
        constant_ridge(gram, torch.ones(len(gram)))
    with pytest.raises(ValueError, match=r"Uniform, Categorical or Fixed, got 5\.0"):
        bayes_ridge(gram, 9, 5.0)


@pytest.mark.parametrize(
    ("sigma", "message"),
    [
        (torch.ones(1), r"sigma must have shape \[B\] = \(6,\), got \(1,\)"),
        (torch.ones(6, 1), r"got \(6, 1\)"),
        (1.0, "got 1.0"),
        (-torch.ones(6), "must be >= 0"),
        (torch.full((6,), math.nan), "must be >= 0"),
    ],
)
def test_an_oracle_of_other_noise_than_the_prompts_is_refused(sigma, message, unchecked):
    gram = prompts_and_grams(Uniform(0, 2))[3]
    with pytest.raises(ValueError, match=message):
        oracle_ridge(gram, sigma)


@pytest.mark.parametrize("context", [3, 9], ids=["n<d", "n>d"])
@pytest.mark.parametrize("noise", [Uniform(0.3, 2), Uniform(0, 2), Categorical((0.5, 2))], ids=repr)
def test_bayes_ridge_is_the_posterior_mean_under_the_likelihood_of_all_labels(noise, context):
    x, y, _, gram = prompts_and_grams(noise, context=context)
    if isinstance(noise, Uniform):  # midpoints: an other rule than the one under test
        sigmas = noise.low + (noise.high - noise.low) * (np.arange(4000) + 0.5) / 4000
    else:
        sigmas = np.array(noise.values)
    expected = []
    for a, b in zip(x, y, strict=True):
        logs, means = [], []
        for sigma in sigmas:
            covariance = a @ a.T + sigma**2 * np.eye(context)
            solved = np.linalg.solve(covariance, b)
            logs.append(-0.5 * (np.linalg.slogdet(covariance)[1] + b @ solved))
            means.append(a.T @ solved)
        weight = np.exp(np.array(logs) - max(logs))
        expected.append(weight @ np.stack(means) / weight.sum())
    np.testing.assert_allclose(
        bayes_ridge(gram, context, noise).numpy(), np.stack(expected), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("noise", [Fixed(1.5), Uniform(1.5, 1.5)], ids=repr)
def test_bayes_ridge_of_known_noise_is_ridge(noise):
    gram = prompts_and_grams(Uniform(0, 2))[3]
    torch.testing.assert_close(bayes_ridge(gram, 9, noise), constant_ridge(gram, 2.25))


def test_bayes_ridge_of_noise_free_prompts_is_exact():
    prompts, gram = prompts_and_grams(Fixed(0))[2:]
    weights = bayes_ridge(gram, 9, Uniform(0, 2))
    torch.testing.assert_close(weights, prompts.weights, rtol=1e-4, atol=1e-4)


def test_results_have_the_type_of_the_gram():
    gram = prompts_and_grams(Uniform(0, 2))[3]
    for predict in (
        ols,
        lambda g: bayes_ridge(g, 9, Uniform(0, 2)),
        lambda g: adaptive_ridge(g, 9),
    ):
        single = predict(gram.float())
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), predict(gram), rtol=1e-3, atol=1e-3)


# Facts of Table 1's closed forms, recomputed independently: half the squared error minus the
# oracle's; and the tuned parameters.
CLOSED_FORMS = {
    "sigma_5": (Uniform(0, 5), 1.5614, 0.3611, 0.0701, 0.0503, 0.0397),
    "set_1_3": (Categorical((1, 3)), 1.2232, 0.2197, 0.0514, 0.0214, 0.0054),
}
TUNED = {"sigma_5": (13.7, 1.31), "set_1_3": (6.03, 1.49)}


@pytest.fixture(scope="module", params=CLOSED_FORMS)
def column(request):
    noise = CLOSED_FORMS[request.param][0]
    task = NoisyRegression(dim=10, context=20, noise=noise)
    return request.param, noise, task.sample_gram(50_000, generator=11, dtype=torch.float64)


def test_closed_forms_have_their_known_losses(column):
    name, noise, (gram, truth, sigma) = column
    _, oracle, *expected = CLOSED_FORMS[name]
    base = half_square(oracle_ridge(gram, sigma), truth)
    assert float(base.mean()) == pytest.approx(oracle, abs=4 * float(base.std()) / 50_000**0.5)
    threshold, factor = TUNED[name]
    predictors = [
        constant_ridge(gram, noise.mean_square),
        adaptive_ridge(gram, 20),
        tuned_ridge(gram, 20, threshold, factor),
        bayes_ridge(gram, 20, noise),
    ]
    adjusted = [half_square(weights, truth) - base for weights in predictors]
    for ours, known in zip(adjusted, expected, strict=True):
        # The known values have an error of the same kind.
        error = 1.5 * float(ours.std()) / 50_000**0.5
        assert float(ours.mean()) == pytest.approx(known, abs=3 * error + 1e-4)
    means = [float(ours.mean()) for ours in adjusted]
    assert 0 < means[-1] == min(means), "Bayes is the floor, and above the oracle"


def test_the_best_constant_is_the_mean_square_of_the_noise(column):
    _, noise, (gram, truth, _) = column
    gram, truth = gram[:20_000], truth[:20_000]
    best = tune_constant(gram, truth)
    assert best == pytest.approx(noise.mean_square, rel=0.1)

    def loss(variance):
        return float(half_square(constant_ridge(gram, variance), truth).mean())

    assert loss(best) <= min(loss(0.9 * best), loss(1.1 * best), loss(noise.mean_square) + 1e-9)


def test_tuned_parameters_are_the_known_ones(column):
    name, _, (gram, truth, _) = column
    gram, truth = gram[:20_000], truth[:20_000]
    threshold, factor = tune_ridge(gram, truth, 20)
    assert threshold == pytest.approx(TUNED[name][0], rel=0.12)
    assert factor == pytest.approx(TUNED[name][1], rel=0.06)

    def loss(t, f):
        return float(half_square(tuned_ridge(gram, 20, t, f), truth).mean())

    best = loss(threshold, factor)
    for t, f in [(0.8, 1), (1.25, 1), (1, 0.9), (1, 1.1)]:
        assert best <= loss(t * threshold, f * factor)


def test_noise_free_prompts_are_tuned_to_least_squares():
    task = NoisyRegression(dim=3, context=8, noise=Fixed(0))
    gram, truth, _ = task.sample_gram(200, generator=0, dtype=torch.float64)
    assert tune_constant(gram, truth) == pytest.approx(0, abs=1e-6)
    assert tune_ridge(gram, truth, 8) == (0.0, 1.0)
