from dataclasses import replace

import pytest
import torch

from rankone.icl.ahn.closed_forms import exact_optima
from rankone.icl.ahn.measures import distance, draw_losses, fresh_prompts, multiple, shown
from rankone.icl.ahn.problem import Problem
from rankone.icl.ahn.spectrum import degree
from rankone.icl.ahn.training import Recipe, objective, train

PROBLEM = Problem()
SMALL = Recipe(prompts=300, few=100, few_iterations=8, iterations=5, starts=2, every=3)


def test_the_objective_is_the_logarithm_of_the_mean_loss_and_has_its_gradient():
    g = torch.Generator().manual_seed(0)
    sample = PROBLEM.sample_grams(7, generator=0, spikes=(0.5, 2.0))
    x = 0.3 * torch.randn(1, 75, generator=g, dtype=torch.float64)
    for white in (False, True):
        function = objective(PROBLEM, 2, sample, white=white)
        value, gradient = function(x)
        for k in (0, 30, 74):
            step = torch.zeros_like(x)
            step[0, k] = 1e-5
            slope = (function(x + step)[0] - function(x - step)[0]) / 2e-5
            torch.testing.assert_close(slope, gradient[:, k], atol=1e-8, rtol=1e-6)
        assert value.isfinite().all()


def test_theorem_3_training_ends_at_multiples_of_the_inverse_covariance():
    """From 1e-4 in the paper's coordinates; 5,000 prompts: multiples to 3 %, distances 0.05."""
    recipe = Recipe(prompts=5000, few=1000, few_iterations=200, iterations=60, starts=1)
    trained = train(PROBLEM, "theorem3", 3, [0], recipe)
    seen = shown(trained.matrices, PROBLEM)
    best = torch.tensor(exact_optima("theorem3", 3, context=20, searches=4)[0].a).double()
    found = multiple(seen.A[0]).sort(descending=True).values
    torch.testing.assert_close(found, best, rtol=0.03, atol=0)
    assert distance(seen.A).max() < 0.06
    # Not of the identity: that is the point of the theorem.
    assert distance(trained.matrices.A).min() > 0.3
    assert seen.B.shape == (1, 0, 5, 5)


def test_theorem_4_training_ends_at_multiples_of_both_kinds():
    """Two layers, trained for the expectation: A_l = a_l Σ⁻¹, B_0 = b_0 I, the exact optimum."""
    recipe = Recipe(
        prompts=4000, few=1000, few_iterations=250, iterations=60, starts=1, spiked=True
    )
    trained = train(PROBLEM, "theorem4", 2, [0, 1], recipe)
    seen = shown(trained.matrices, PROBLEM)
    best = exact_optima("theorem4", 2, context=20, searches=12)[0]
    for row in range(2):
        found = torch.cat([multiple(seen.A[row]), multiple(seen.B[row])])
        expected = torch.tensor([*best.a, *best.b], dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0)
    assert distance(seen.A).max() < 0.06
    assert distance(seen.B).max() < 0.06
    spiked = fresh_prompts(PROBLEM, 3, 2000, seed=0, degree=degree(2, 1))
    means = draw_losses(trained.matrices, PROBLEM, spiked).mean(0)
    torch.testing.assert_close(means, torch.full_like(means, best.loss), rtol=0.1, atol=0)


def test_a_seed_does_not_feel_the_seeds_beside_it():
    many = train(PROBLEM, "theorem4", 2, [0, 1], SMALL)
    alone = train(PROBLEM, "theorem4", 2, [1], SMALL)
    torch.testing.assert_close(many.matrices.A[1:], alone.matrices.A, atol=1e-4, rtol=1e-3)
    assert (many.matrices.A[0] - many.matrices.A[1]).abs().max() > 1e-3


def test_training_again_gives_the_same_bits():
    first, again = (train(PROBLEM, "theorem4", 2, [3], SMALL) for _ in range(2))
    assert torch.equal(first.matrices.A, again.matrices.A)
    assert torch.equal(first.history.B, again.history.B)


@pytest.mark.parametrize("change", [{}, {"white": True}, {"spiked": True, "double": True}], ids=str)
def test_the_history_begins_at_random_values_and_ends_at_the_model(change):
    calls = []
    recipe = replace(SMALL, **change)
    trained = train(PROBLEM, "theorem4", 2, [0, 1], recipe, progress=lambda: calls.append(1))
    assert trained.starts.shape == (2, 2)
    assert trained.few_steps == 8
    assert trained.steps.tolist() == [0, 3, 6, 8, 11, 13]
    assert len(calls) == 13
    assert trained.history.A.shape == (6, 2, 2, 5, 5)
    assert trained.history.B.shape == (6, 2, 1, 5, 5)
    torch.testing.assert_close(trained.history.A[-1], trained.matrices.A)
    assert trained.history.A[0].abs().max() < (0.01 if recipe.white else 1e-3)
    assert (trained.training_loss < 4).all()


def test_threads_are_given_back():
    before = torch.get_num_threads()
    train(PROBLEM, "theorem3", 1, [0], SMALL)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("name", ["prompts", "iterations", "few", "few_iterations", "starts"])
def test_wrong_recipes_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Recipe(**{name: 0})


def test_training_nothing_is_refused():
    with pytest.raises(ValueError, match="seeds must hold at least one seed"):
        train(PROBLEM, "theorem3", 1, [], SMALL)
    with pytest.raises(ValueError, match="draws and prompts must be at least 1, got 0 and 5"):
        fresh_prompts(PROBLEM, 0, 5, seed=0)
