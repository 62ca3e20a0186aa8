import pytest
import torch

from rankone.icl.ahn.closed_forms import (
    best_rate,
    descent,
    exact_optima,
    least_squares_loss,
    theorem1_loss,
    theorem1_minimum,
)
from rankone.icl.ahn.layers import Matrices, as_transformer, losses
from rankone.icl.ahn.measures import layer_order
from rankone.icl.ahn.problem import Problem
from rankone.icl.ahn.published import A_THEOREM3
from rankone.icl.ahn.spectrum import expected_loss
from rankone.icl.ahn.training import Recipe, train

ONE_LAYER = Problem(context=20, weights="identity")


def test_the_exact_loss_of_one_layer_is_that_of_a_sample():
    """100,000 prompts: within four standard errors, for a random A."""
    g = torch.Generator().manual_seed(0)
    A = -torch.eye(5) + 0.3 * torch.randn(1, 1, 5, 5, generator=g, dtype=torch.float64)
    grams, _ = ONE_LAYER.sample_grams(100_000, generator=1)
    sampled = losses(Matrices(A, A[:, :0]), grams, ONE_LAYER)
    error = sampled.std() / sampled.numel() ** 0.5
    assert abs(sampled.mean() - theorem1_loss(A[0, 0], ONE_LAYER)) < 4 * error


@pytest.mark.parametrize("context", [2, 20])
def test_theorem_1_is_the_global_minimum(context):
    """The gradient is zero and the loss, a quadratic function of A, is convex."""
    problem = Problem(context=context, weights="identity")
    A = theorem1_minimum(problem).requires_grad_()
    (gradient,) = torch.autograd.grad(theorem1_loss(A, problem), A)
    assert gradient.abs().max() < 1e-14
    g = torch.Generator().manual_seed(0)
    others = A.detach() + torch.randn(50, 5, 5, generator=g, dtype=torch.float64)
    assert (theorem1_loss(others, problem) > theorem1_loss(A.detach(), problem)).all()


def test_theorem_1_has_no_gradient_on_tokens_in_p_and_q_either():
    """Monte Carlo over all entries of P and Q on 100,000 prompts: every entry of the gradient is
    within five of its standard errors of zero, which are at most 0.1."""
    model = as_transformer(
        Matrices(theorem1_minimum(ONE_LAYER)[None], torch.zeros(0, 5, 5).double()), 20
    )
    prompts = ONE_LAYER.sample(100_000, generator=4)
    parts = []
    for tokens, target in zip(prompts.tokens.split(5000), prompts.target.split(5000), strict=True):
        loss = (model(tokens) - target).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        # Q holds A / n: in the units of A its gradient is that of Q divided by n.
        parts.append(torch.cat([gradients[0].flatten(), gradients[1].flatten() / 20]))
    found = torch.stack(parts)
    error = found.std(0) / len(found) ** 0.5
    assert (found.mean(0).abs() < 5 * error + 1e-12).all()
    assert error.max() < 0.1


def test_training_one_layer_ends_at_theorem_1():
    """On 20,000 prompts A is off by the error of the sample, about 1 %, its exact loss by 1e-4."""
    recipe = Recipe(starts=1, few=1000, few_iterations=60, iterations=60)
    trained = train(ONE_LAYER, "theorem3", 1, [0], recipe)
    A, best = trained.matrices.A[0, 0], theorem1_minimum(ONE_LAYER)
    assert (A - best).norm() < 0.03 * best.norm()
    excess = theorem1_loss(A, ONE_LAYER) / theorem1_loss(best, ONE_LAYER) - 1
    assert 0 <= excess < 1e-3


def test_isotropic_features_need_one_number():
    problem = Problem(context=20, weights="identity", eigenvalues=(1.0,) * 5)
    expected = -torch.eye(5, dtype=torch.float64) / ((20 - 1) / 20 + (5 + 2) / 20)
    torch.testing.assert_close(theorem1_minimum(problem), expected)


@pytest.mark.parametrize("method", ["gd", "pgd"])
def test_baselines_are_steps_of_gradient_descent(method):
    problem = Problem(context=9)
    prompts = problem.sample(4, generator=0)
    x, y = prompts.tokens[:, :-1, :-1], prompts.tokens[:, :-1, -1]
    metric = torch.eye(5).double() if method == "gd" else torch.linalg.inv(problem.covariance)
    w = torch.zeros(4, 5, dtype=x.dtype)
    for _ in range(3):
        gradient = (x.mT @ (x @ w[:, :, None] - y[:, :, None])).squeeze(2) / 9
        w = w - 0.3 * gradient @ metric
    models = descent(problem, method, 3, torch.tensor([0.3], dtype=x.dtype))
    keys = prompts.tokens[:, :-1]
    own = as_transformer(Matrices(models.A[0], models.B[0]), 9).implicit_weights(keys.mT @ keys)
    torch.testing.assert_close(own, w)


def test_the_best_rate_of_one_preconditioned_step_is_known():
    """n / (n + d + 1); a sample of 20,000 prompts knows it to about 0.5 %."""
    problem = Problem(context=8)
    sample = problem.sample_grams(20_000, generator=0)
    assert best_rate(problem, "pgd", 1, sample) == pytest.approx(8 / 14, rel=0.02)


def test_preconditioning_does_not_hurt():
    problem = Problem(context=10)
    sample = problem.sample_grams(4000, generator=0)
    least = {}
    for method in ("gd", "pgd"):
        rate = torch.tensor([best_rate(problem, method, 3, sample)], dtype=torch.float64)
        least[method] = losses(descent(problem, method, 3, rate), sample.grams, problem).mean()
    assert least["pgd"] < 0.5 * least["gd"]


@pytest.mark.parametrize("examples", [1, 3, 5, 8])
def test_least_squares_leaves_what_the_examples_do_not_show(examples):
    problem = Problem(context=examples)
    prompts = problem.sample(4000, generator=0)
    white = prompts.tokens[:, :-1, :-1] @ problem.power(-0.5)
    v = torch.linalg.pinv(white) @ prompts.tokens[:, :-1, -1:]
    errors = v.squeeze(2) - prompts.weights @ problem.power(0.5)
    mean = float(errors.square().sum(1).mean())
    assert mean == pytest.approx(least_squares_loss(5, examples), abs=0.15)


def test_the_published_multiples_of_theorem_3_are_the_exact_optimum():
    (best,) = exact_optima("theorem3", 3, context=20, searches=8)
    order = layer_order(torch.tensor([best.a]), A_THEOREM3)[0]
    torch.testing.assert_close(
        torch.tensor(best.a)[order], torch.tensor(A_THEOREM3), atol=0.01, rtol=0
    )
    assert best.loss == pytest.approx(0.133608, abs=1e-6)
    assert best.found == 8


def test_theorem_4_has_several_minima():
    optima = exact_optima("theorem4", 2, context=20, searches=12)
    assert len(optima) > 1
    assert [o.loss for o in optima] == sorted(o.loss for o in optima)
    assert sum(o.found for o in optima) == 12
    best = optima[0]
    a, b = (torch.tensor(part, dtype=torch.float64).requires_grad_() for part in best[1:3])
    loss = expected_loss(a, b, context=20)
    assert float(loss.detach()) == pytest.approx(best.loss)
    for gradient in torch.autograd.grad(loss, (a, b)):
        assert gradient.abs().max() < 1e-5


def test_wrong_inputs_are_refused(unchecked):
    with pytest.raises(ValueError, match="method must be one of gd, pgd, got 'sgd'"):
        descent(ONE_LAYER, "sgd", 1, torch.ones(1))
    with pytest.raises(ValueError, match="searches must be at least 1, got 0"):
        exact_optima("theorem3", 1, context=3, searches=0)
    with pytest.raises(ValueError, match="weights must be 'identity' for Theorem 1"):
        theorem1_loss(torch.eye(5), Problem())
