"""Probes find in constructed models what was put there."""

from __future__ import annotations

import pytest
import torch

from rankone.icl import Fixed, NoisyRegression, constant_ridge
from rankone.icl.baselines import Spectrum
from rankone.icl.probes import nearest_ridge, probe
from rankone.icl.theory import gradient_descent, least_squares_schedule, two_noise_ridge
from rankone.tasks.regression import Grams


def prompts(sigma: float, *, dim: int = 4, context: int = 30, covariance=None) -> Grams:
    task = NoisyRegression(dim=dim, context=context, noise=Fixed(sigma), covariance=covariance)
    return task.sample_gram(1500, generator=0, dtype=torch.float64)


def test_steps_of_gradient_descent_are_found():
    steps = [0.02, 0.01, 0.005]
    found = probe(gradient_descent(steps, dim=4), prompts(1.0), context=30)
    assert [layer.step for layer in found[1:]] == pytest.approx([30 * step for step in steps])
    assert [layer.alignment for layer in found[1:]] == pytest.approx([1.0] * 3)
    for layer in found:
        assert layer.momentum == 0
        assert layer.label == 1
        assert (layer.precondition_low, layer.precondition_high) == pytest.approx((1.0, 1.0))
    assert [layer.rescaling for layer in found] == [None, 1.0, 1.0, 1.0]
    assert found[0].ridge_variance is None  # zeros are no ridge solution of a finite variance


@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_rescaling_is_found(sigma):
    n, dim = 100_000, 4
    model = two_noise_ridge(0.5, 2.0, dim=dim, context=n)
    found = probe(
        model, prompts(sigma, context=n, covariance=torch.eye(dim).double() / n), context=n
    )
    step = 1 / (1 + sigma**2)
    assert found[1].rescaling == pytest.approx(1.0)
    rescaling = found[2].rescaling
    assert rescaling is not None
    assert rescaling * -float(model.p[0, 0, 1].detach()) == pytest.approx(step, rel=0.01)
    assert found[2].adjusted_loss == pytest.approx(0.0, abs=0.01)
    assert found[2].ridge_variance == pytest.approx(sigma**2, rel=0.1)


def test_preconditioning_is_found_and_least_squares_is_a_ridge_of_no_noise():
    grams = prompts(0.0)
    values = torch.linalg.eigvalsh(grams.gram[:, :4, :4])
    model = least_squares_schedule(float(values.min()), float(values.max()), 1e-9, dim=4)
    found = probe(model, grams, context=30)
    assert found[-1].adjusted_loss == pytest.approx(0.0, abs=1e-12)
    assert found[-1].ridge_variance == 0.0
    lows = [layer.precondition_low for layer in found]
    assert lows == sorted(lows, reverse=True)
    assert lows[-2] < 0.5  # the last layer leaves the features alone


def test_the_nearest_ridge_of_a_ridge_solution_is_itself():
    grams = prompts(1.0)
    spectrum = Spectrum.of(grams.gram)
    for variance in (0.0, 0.01, 1.0, 10.0, 100.0):
        found, distance = nearest_ridge(spectrum, constant_ridge(grams.gram, variance))
        assert bool(torch.isclose(found, torch.tensor(variance).double(), rtol=0.02).all())
        assert float(distance.max()) < 0.02
    away, _ = nearest_ridge(spectrum, 100 * torch.randn(1500, 4, dtype=torch.float64))
    assert bool((away >= 0).all())


@pytest.mark.usefixtures("unchecked")
def test_a_context_without_examples_is_refused():
    with pytest.raises(ValueError, match="context must be at least 1, got 0"):
        probe(gradient_descent([0.1], dim=4), prompts(1.0), context=0)
