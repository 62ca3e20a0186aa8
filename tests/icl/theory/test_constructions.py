"""Weights that are said to compute something compute it."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from rankone.icl import (
    Categorical,
    Fixed,
    LinearTransformer,
    NoisyRegression,
    Uniform,
    constant_ridge,
    ols,
    oracle_ridge,
)
from rankone.icl.theory import (
    best_single_layer,
    gdpp_floor,
    gradient_descent,
    least_squares_schedule,
    preconditioned_descent,
    two_noise_ridge,
)
from rankone.icl.theory.constructions import schedule_length
from rankone.icl.theory.floor import response

EYE = torch.eye(2)
COVARIANCE = torch.tensor([[2.0, 0.3, 0.0], [0.3, 1.0, 0.2], [0.0, 0.2, 0.25]]).double()


def grams(batch: int, *, dim: int = 3, context: int = 12, noise=None, covariance=None, seed=0):
    task = NoisyRegression(
        dim=dim, context=context, noise=noise or Uniform(0, 2), covariance=covariance
    )
    return task.sample_gram(batch, generator=seed, dtype=torch.float64)


def test_gradient_descent_takes_its_steps():
    steps, drawn = [0.05, 0.02, 0.01], grams(4)
    model = gradient_descent(steps, dim=3)
    sums, moment = drawn.gram[:, :3, :3], drawn.gram[:, :3, 3]
    w = torch.zeros_like(moment)
    layers = model.implicit_weights(drawn.gram, every_layer=True).unbind(1)[1:]
    for step, after in zip(steps, layers, strict=True):
        w = w + step * (moment - torch.einsum("bij,bj->bi", sums, w))
        torch.testing.assert_close(after, w)


def test_preconditioned_descent_takes_its_steps():
    A = torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(0)).double() * 0.2
    drawn, n = grams(4), 12
    model = preconditioned_descent(A, context=n)
    sums, moment = drawn.gram[:, :3, :3], drawn.gram[:, :3, 3]
    w = torch.zeros_like(moment)
    for a in A:
        gradient = (torch.einsum("bij,bj->bi", sums, w) - moment) / n
        w = w - gradient @ a.mT
    torch.testing.assert_close(model.implicit_weights(drawn.gram), w)


@pytest.mark.parametrize("condition", [1.0, 1.05, 3.0, 100.0, 1e5])
@pytest.mark.parametrize("accuracy", [0.3, 1e-3, 1e-9])
def test_the_schedule_solves_least_squares(condition, accuracy):
    low = 0.7
    model = least_squares_schedule(low, low * condition, accuracy, dim=4)
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(4, 4, generator=g, dtype=torch.float64)).Q
    values = torch.tensor([0.0, 0.2, 0.7, 1.0], dtype=torch.float64) * (condition - 1) + 1
    sums = basis @ torch.diag(low * values) @ basis.mT
    truth = torch.randn(4, generator=g, dtype=torch.float64)
    moment = sums @ truth
    gram = torch.zeros(1, 5, 5, dtype=torch.float64)
    gram[0, :4, :4], gram[0, :4, 4], gram[0, 4, :4] = sums, moment, moment
    gram[0, 4, 4] = truth @ moment
    found = model.implicit_weights(gram)[0]
    rounding = 1e-12 * condition
    assert float((found - truth).detach().norm()) <= (accuracy + rounding) * float(truth.norm())
    assert model.layers == schedule_length(condition, accuracy)


def test_its_length_grows_as_the_logarithm_and_the_double_logarithm():
    by_condition = [schedule_length(10.0**k, 1e-3) for k in range(1, 13)]
    steps = [after - before for before, after in pairwise(by_condition)]
    # A tenfold condition number takes log 10 / log (9/4) layers more, 2.84.
    assert set(steps) <= {2, 3}
    assert by_condition[-1] - by_condition[0] == pytest.approx(11 * math.log(10, 9 / 4), abs=1.5)
    squarings = [schedule_length(10.0, 2.0 ** -(2.0**k)) for k in range(1, 10)]
    steps = [after - before for before, after in pairwise(squarings)]
    assert set(steps) <= {0, 1}
    assert sum(steps) >= 7  # a square of the accuracy is one layer


def test_two_layers_reach_both_ridge_solutions():
    first, second, dim, n = 0.5, 2.0, 4, 400_000
    model = two_noise_ridge(first, second, dim=dim, context=n)
    drawn = grams(
        400, dim=dim, context=n, noise=Categorical((first, second)),
        covariance=torch.eye(dim).double() / n,
    )  # fmt: skip
    moment = drawn.gram[:, :dim, dim]
    found = model.implicit_weights(drawn.gram).detach()
    for sigma in (first, second):
        own = drawn.sigma == sigma
        want = moment[own] / (1 + sigma**2)
        assert float((found[own] - want).norm() / want.norm()) < 0.01
        best = oracle_ridge(drawn.gram[own], drawn.sigma[own])
        assert float((found[own] - best).norm() / best.norm()) < 0.01
    # One layer cannot: any step is wrong by a share of one of the two.
    step = gradient_descent([1 / (1 + first**2)], dim=dim).implicit_weights(drawn.gram).detach()
    own = drawn.sigma == second
    assert float((step[own] - found[own]).norm() / found[own].norm()) > 1


@pytest.mark.parametrize("variance", [0.0, 1.5])
def test_the_best_single_layer_has_no_gradient_and_training_ends_there(variance):
    n = 8
    model = best_single_layer(COVARIANCE, context=n, variance=variance)
    noise = Fixed(math.sqrt(variance))
    drawn = grams(100_000, context=n, noise=noise, covariance=COVARIANCE)
    P, Q = (x.detach().requires_grad_() for x in model.matrices())
    halves = []
    for part in (slice(0, None, 2), slice(1, None, 2)):
        loss = expected_loss(P, Q, drawn.gram[part], drawn.weights[part])
        halves.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, (P, Q))]))
    mean, error = sum(halves) / 2, (halves[0] - halves[1]).norm() / 2
    assert float(mean.norm()) < 3 * float(error)  # no more than Monte Carlo leaves
    trained = train(drawn.gram[:20_000], drawn.weights[:20_000], steps=500)
    scale = float(trained[0][0, 0, 3, 3])  # (P, Q) and (c P, Q / c) are one model
    got = trained[1][0, 0, :3, :3] * scale
    want = model.matrices()[1][0, 0, :3, :3].detach()
    assert float((got - want).norm() / want.norm()) < 0.05


def expected_loss(P, Q, gram, weights):
    """Over queries x ~ N(0, C)."""
    step = (P[0] @ gram[:, None] @ Q[0]).sum(1)
    off = -step[:, -1, :-1] - weights
    return torch.einsum("bi,ij,bj->b", off, COVARIANCE, off).mean() / 2


def train(gram, weights, *, steps: int):
    """Adam, all of P and Q free, from small weights that lean to reading labels.

    Without that they may end in another minimum, which reads <p, alpha> q, of rank one.
    """
    g = torch.Generator().manual_seed(0)
    P, Q = (0.05 * torch.randn(1, 1, 4, 4, generator=g, dtype=torch.float64) for _ in range(2))
    P[..., 3, 3] += 0.5
    P.requires_grad_(), Q.requires_grad_()
    optimiser = torch.optim.Adam([P, Q], lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        expected_loss(P, Q, gram, weights).backward()
        optimiser.step()
        schedule.step()
    return P.detach(), Q.detach()


def test_gdpp_never_beats_constant_ridge():
    variance, g = 2.0, torch.Generator().manual_seed(0)
    sums = grams(500, noise=Fixed(0.0)).gram[:, :3, :3]
    for scale in (0.01, 0.1, 0.3):
        model = LinearTransformer(
            kind="gd++", layers=3, heads=2, dim=3, scale=scale, generator=g
        ).double()
        found = gdpp_floor(model, sums, variance)
        assert found.gap >= 0
        assert found.model == pytest.approx(found.constant_ridge + found.gap)


def test_the_floor_is_the_mean_over_prompts():
    noise = Fixed(1.5)
    drawn = grams(200_000, noise=noise)
    model = gradient_descent([0.04, 0.04], dim=3)
    found = gdpp_floor(model, drawn.gram[:, :3, :3], noise.mean_square)
    ridge = constant_ridge(drawn.gram, noise.mean_square)
    for want, w in (
        (found.model, model.implicit_weights(drawn.gram)),
        (found.constant_ridge, ridge),
    ):
        losses = (w.detach() - drawn.weights).square().sum(1) / 2
        error = float(losses.std() / math.sqrt(len(losses)))
        assert float(losses.mean()) == pytest.approx(want, abs=4 * error)


def test_diag_beats_that_floor():
    first, second, dim, n = 0.5, 3.0, 3, 100_000
    drawn = grams(
        2000, dim=dim, context=n, noise=Categorical((first, second)),
        covariance=torch.eye(dim).double() / n,
    )  # fmt: skip
    model = two_noise_ridge(first, second, dim=dim, context=n)
    loss = (model.implicit_weights(drawn.gram) - drawn.weights).square().sum(1).mean() / 2
    ridge = constant_ridge(drawn.gram, (first**2 + second**2) / 2)
    assert float(loss.detach()) < float((ridge - drawn.weights).square().sum(1).mean() / 2) - 0.1


def test_the_response_of_gdpp_makes_its_weights():
    drawn = grams(5)
    model = LinearTransformer(kind="gd++", layers=3, heads=2, dim=3, scale=0.2).double()
    F = response(model, drawn.gram[:, :3, :3])
    want = torch.einsum("bij,bj->bi", F, drawn.gram[:, :3, 3])
    torch.testing.assert_close(model.implicit_weights(drawn.gram), want)


@torch.no_grad()
def test_no_model_represents_a_quadratic():
    """Theorem 4.2: labels x_1² are seen as a linear function of x plus what is left of them, so
    that no layer's labels are near a fresh quadratic's values."""
    n, dim = 4000, 5
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, n + 200, dim, generator=g, dtype=torch.float64)
    y = x[..., :1] ** 2
    y[:, n:] = 0.0  # queries
    tokens = torch.cat([x, y], dim=-1)
    for seed in range(20):
        model = LinearTransformer(kind="full", layers=3, dim=dim, scale=0.01, generator=seed)
        model = model.double()
        keys = tokens[:, :n]
        w = model.implicit_weights(keys.mT @ keys)
        predicted = torch.einsum("bi,bti->bt", w, x[:, n:])[0]
        if not bool(torch.isfinite(predicted).all()) or not float(predicted.norm()):
            continue
        truth = x[0, n:, 0] ** 2
        cosine = float((predicted @ truth) / (predicted.norm() * truth.norm()))
        assert abs(cosine) <= 0.15


def test_least_squares_is_where_the_schedule_leads():
    drawn = grams(3, context=40, noise=Fixed(1.0))
    values = torch.linalg.eigvalsh(drawn.gram[:, :3, :3])
    model = least_squares_schedule(float(values.min()), float(values.max()), 1e-10, dim=3)
    torch.testing.assert_close(model.implicit_weights(drawn.gram), ols(drawn.gram))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gradient_descent([], dim=2), "steps must be one or more positive numbers"),
        (lambda: gradient_descent([0.1, -1.0], dim=2), r"positive numbers, got \[0.1, -1.0\]"),
        (lambda: preconditioned_descent(EYE, context=3), r"shape \[L, d, d\], got \(2, 2\)"),
        (lambda: preconditioned_descent(EYE[None], context=0), "context must be at least 1"),
        (lambda: best_single_layer(-torch.eye(2), context=3), "positive definite"),
        (lambda: best_single_layer(torch.eye(2), context=0), "context must be at least 1"),
        (lambda: least_squares_schedule(2.0, 1.0, 0.1, dim=2), "low must be positive and at most"),
        (lambda: least_squares_schedule(1.0, 2.0, 0.0, dim=2), "accuracy must be positive"),
        (lambda: two_noise_ridge(-1.0, 1.0, dim=2, context=3), "must not be negative"),
        (
            lambda: gdpp_floor(LinearTransformer(kind="diag", layers=1, dim=2), EYE[None], 1.0),
            "that of gd\\+\\+ models, got a diag one",
        ),
        (
            lambda: gdpp_floor(LinearTransformer(kind="gd++", layers=1, dim=2), torch.eye(2), 1.0),
            r"features must have shape \[B, 2, 2\]",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
