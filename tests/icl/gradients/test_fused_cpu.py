"""The CPU kernels equal autograd. Compiling is slow: all sizes but one have 10 features."""

import math

import numba
import pytest
import torch

from rankone.icl.evaluation import weights_after_layers
from rankone.icl.gradients import loss_and_grad
from rankone.icl.model import KINDS, LinearTransformer, parameter_shapes
from rankone.tasks.noise import Uniform
from rankone.tasks.regression import NoisyRegression

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def problem(kind, *, layers, heads, dim=10, batch=37, members=3, dtype=torch.float64, seed=0):
    """Models of a size at which prompts are neither solved nor blown up."""
    g = torch.Generator().manual_seed(seed)
    shapes = parameter_shapes(kind, layers, dim, heads)
    scale = 0.5 / ((dim + 1) ** 0.5 if kind == "full" else 1) / heads**0.5
    p, q = (
        scale * torch.randn(members, *shapes[k], generator=g, dtype=torch.float64) for k in "pq"
    )
    task = NoisyRegression(dim=dim, context=2 * dim, noise=Uniform(0, 3))
    gram, weights, _ = task.sample_gram(2 * batch, generator=seed, dtype=torch.float64)
    gram = gram.view(2, batch, dim + 1, dim + 1) / (2 * dim)
    gram = gram / (1 + gram[..., -1:, -1:].sqrt()) ** 0.5
    importance = 0.5 + torch.rand(2, batch, generator=g, dtype=torch.float64)
    stream = torch.arange(members) % 2
    floats = [x.to(dtype) for x in (p, q, gram, weights.view(2, batch, dim))]
    return [*floats, stream], importance.to(dtype)


def assert_close(ours, expected, tolerance):
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert bool(torch.isfinite(b).all())
        scale = max(1e-6, float(b.abs().max()))
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("limit", [math.inf, 10.0])
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_equals_reference(kind, layers, heads, limit, dtype):
    data, importance = problem(kind, layers=layers, heads=heads, dtype=dtype)
    options = {"importance": importance, "limit": limit}
    ours = loss_and_grad(kind, *data, **options, impl="fused_cpu")
    expected = loss_and_grad(kind, *data, **options, impl="reference")
    assert_close(ours, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_members_may_have_limits_of_their_own(kind):
    data, importance = problem(kind, layers=2, heads=1)
    limits = torch.tensor([math.inf, 0.5, 30.0], dtype=torch.float64)
    ours = loss_and_grad(kind, *data, importance=importance, limit=limits, impl="fused_cpu")
    for member, limit in enumerate(limits.tolist()):
        alone = loss_and_grad(kind, *data, importance=importance, limit=limit, impl="reference")
        assert_close([t[member] for t in ours], [t[member] for t in alone], 1e-10)


@pytest.mark.parametrize("batch", [1, 15, 16, 17, 128, 129, 300])
def test_any_batch_is_whole(batch):
    for kind in ("full", "diag"):
        data, importance = problem(kind, layers=2, heads=1, batch=batch)
        ours = loss_and_grad(kind, *data, importance=importance, impl="fused_cpu")
        expected = loss_and_grad(kind, *data, importance=importance, impl="reference")
        assert_close(ours, expected, 1e-10)


@pytest.mark.parametrize("kind", ["full", "diag"])
def test_another_number_of_features_works(kind):
    data, importance = problem(kind, layers=3, heads=2, dim=3)
    ours = loss_and_grad(kind, *data, importance=importance, limit=10.0, impl="fused_cpu")
    expected = loss_and_grad(kind, *data, importance=importance, limit=10.0, impl="reference")
    assert_close(ours, expected, 1e-10)


@pytest.mark.parametrize("factor", [1e4, 1e12, math.inf])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_explode_are_dropped_alike(kind, dtype, factor):
    data, importance = problem(kind, layers=4, heads=1, dtype=dtype)
    data[2][0, 3] *= factor
    data[2][1, 36] *= factor
    options = {"importance": importance, "limit": 10.0}
    ours = loss_and_grad(kind, *data, **options, impl="fused_cpu")
    expected = loss_and_grad(kind, *data, **options, impl="reference")
    assert_close(ours, expected, TOLERANCE[dtype])
    assert float(ours.loss.min()) > 0.5 * float(importance.min()) * 10 * math.asinh(1e7) / 37


def test_without_a_limit_an_explosion_shows_in_the_loss():
    data, _ = problem("full", layers=4, heads=1, dtype=torch.float32)
    data[2][0, 3] *= 1e12
    loss = loss_and_grad("full", *data, impl="fused_cpu").loss
    assert torch.isfinite(loss).tolist() == [False, True, False]


def test_nearly_solved_prompts_count_as_they_are():
    """Far below the limit asinh is left out: the same to a part in a million."""
    data, _ = problem("full", layers=2, heads=1, batch=20)
    p, q, gram, _, stream = data
    truth = torch.stack(
        [LinearTransformer.from_matrices(p[0], q[0]).implicit_weights(g).detach() for g in gram]
    )
    near = [p[:1], q[:1], gram, truth + 1e-3, stream[:1]]
    ours = loss_and_grad("full", *near, limit=10.0, impl="fused_cpu")
    expected = loss_and_grad("full", *near, limit=10.0, impl="reference")
    assert_close(ours, expected, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_does_not_depend_on_the_members_beside_it(kind):
    (p, q, gram, weights, stream), _ = problem(kind, layers=2, heads=1, dtype=torch.float32)
    together = loss_and_grad(kind, p, q, gram, weights, stream, impl="fused_cpu")
    for r in range(3):
        one = slice(r, r + 1)
        alone = loss_and_grad(kind, p[one], q[one], gram, weights, stream[one], impl="fused_cpu")
        for a, b in zip(together, alone, strict=True):
            assert torch.equal(a[one], b)


def test_results_do_not_depend_on_the_number_of_threads():
    data, _ = problem("full", layers=2, heads=1, batch=300, dtype=torch.float32)
    many = loss_and_grad("full", *data, impl="fused_cpu")
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        one = loss_and_grad("full", *data, impl="fused_cpu")
    finally:
        numba.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(many, one, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (3, 2)])
def test_weights_after_layers_are_the_models_own(kind, layers, heads):
    (p, q, gram, _, _), _ = problem(kind, layers=layers, heads=heads)
    model = LinearTransformer.from_parameters(kind, p[0], q[0], 10)
    with torch.no_grad():
        expected = model.implicit_weights(gram[0], every_layer=True)
    torch.testing.assert_close(
        weights_after_layers([model], gram[0])[0], expected, rtol=1e-10, atol=1e-12
    )
