import math

import pytest
import torch

from rankone.icl.gradients import loss_and_grad
from rankone.icl.gradients.reference import EXPLODED, implicit_weights
from rankone.icl.model import KINDS, LinearTransformer, parameter_shapes
from rankone.tasks.noise import Uniform
from rankone.tasks.regression import NoisyRegression


def problem(kind, *, members=2, layers=2, heads=2, dim=3, batch=7, scale=0.15):
    g = torch.Generator().manual_seed(0)
    shapes = parameter_shapes(kind, layers, dim, heads)
    p, q = (
        scale * torch.randn(members, *shapes[k], generator=g, dtype=torch.float64) for k in "pq"
    )
    task = NoisyRegression(dim=dim, context=2 * dim, noise=Uniform(0, 2))
    gram, weights, _ = task.sample_gram(2 * batch, generator=1, dtype=torch.float64)
    stream = torch.arange(members) % 2
    importance = 0.5 + torch.rand(2, batch, generator=g, dtype=torch.float64)
    return (
        [p, q, gram.unflatten(0, (2, batch)), weights.unflatten(0, (2, batch)), stream],
        importance,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_half_the_mean_square_error_of_the_implicit_weights(kind):
    (p, q, gram, weights, stream), importance = problem(kind)
    loss = loss_and_grad(
        kind, p, q, gram, weights, stream, importance=importance, impl="reference"
    ).loss
    for r, s in enumerate(stream.tolist()):
        model = LinearTransformer.from_parameters(kind, p[r], q[r], 3)
        with torch.no_grad():
            square = (model.implicit_weights(gram[s]) - weights[s]).square().sum(1)
        torch.testing.assert_close(loss[r], (importance[s] * square).mean() / 2)


@pytest.mark.parametrize("limit", [math.inf, 3.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_finite_differences(kind, limit):
    data, importance = problem(kind, members=1)

    def evaluate(p, q):
        return loss_and_grad(
            kind, p, q, *data[2:], importance=importance, limit=limit, impl="reference"
        )

    p, q = data[:2]
    result = evaluate(p, q)
    step = 1e-6
    for which, grad in ((0, result.p), (1, result.q)):
        for k in range(0, grad.numel(), max(1, grad.numel() // 12)):
            ends = []
            for sign in (1, -1):
                moved = [p.clone(), q.clone()]
                moved[which].view(-1)[k] += sign * step
                ends.append(float(evaluate(*moved).loss))
            slope = (ends[0] - ends[1]) / (2 * step)
            assert slope == pytest.approx(float(grad.reshape(-1)[k]), rel=1e-5, abs=1e-7)


def test_members_may_have_limits_of_their_own():
    data, _ = problem("full")
    limits = torch.tensor([math.inf, 0.5], dtype=torch.float64)
    both = loss_and_grad("full", *data, limit=limits, impl="reference")
    for member, limit in enumerate(limits.tolist()):
        alone = loss_and_grad("full", *data, limit=limit, impl="reference")
        for ours, expected in zip(both, alone, strict=True):
            assert torch.equal(ours[member], expected[member])


def test_the_limit_tempers_large_squares_and_keeps_small_ones():
    data, _ = problem("full")
    losses = [
        loss_and_grad("full", *data, limit=limit, impl="reference").loss
        for limit in (math.inf, 1e12, 1.0)
    ]
    torch.testing.assert_close(losses[0], losses[1])
    assert bool((losses[2] < losses[0]).all())


def test_a_prompt_that_explodes_has_a_loss_but_no_gradient():
    data, _ = problem("full", members=1)
    exploding = [data[0], data[1], data[2].clone(), data[3], data[4]]
    exploding[2][0, 0] *= 1e9
    without = [data[0], data[1], data[2][:, 1:], data[3][:, 1:], data[4]]
    got = loss_and_grad("full", *exploding, limit=10.0, impl="reference")
    rest = loss_and_grad("full", *without, limit=10.0, impl="reference")
    ceiling = 10 * math.asinh(EXPLODED / 10) / 2
    torch.testing.assert_close(7 * got.loss, 6 * rest.loss + ceiling)
    torch.testing.assert_close(7 * got.p, 6 * rest.p)
    torch.testing.assert_close(7 * got.q, 6 * rest.q)


def test_implicit_weights_of_many_models_are_those_of_each():
    (p, q, gram, _, stream), _ = problem("full", members=3)
    together = implicit_weights(p, q, gram[stream])
    for r, s in enumerate(stream.tolist()):
        with torch.no_grad():
            alone = LinearTransformer.from_matrices(p[r], q[r]).implicit_weights(gram[s])
        torch.testing.assert_close(together[r], alone)
