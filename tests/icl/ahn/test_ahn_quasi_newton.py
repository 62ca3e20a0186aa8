from itertools import pairwise

import pytest
import torch

from rankone.icl.ahn.quasi_newton import minimise


def quadratics(rows, size, *, seed=0):
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(rows, size, size, generator=g, dtype=torch.float64)
    H = root @ root.mT + 0.1 * torch.eye(size, dtype=torch.float64)
    least = torch.randn(rows, size, generator=g, dtype=torch.float64)

    def function(x):
        away = (H[: len(x)] @ (x - least[: len(x)])[:, :, None]).squeeze(2)
        return ((x - least[: len(x)]) * away).sum(1) / 2, away

    return function, least


def rosenbrock(x):
    leaf = x.detach().requires_grad_()
    value = (1 - leaf[:, 0]).square() + 100 * (leaf[:, 1] - leaf[:, 0].square()).square()
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


def test_every_row_reaches_its_own_minimum():
    function, least = quadratics(4, 6)
    state = minimise(function, torch.zeros(4, 6).double(), iterations=200, tolerance=1e-14)
    torch.testing.assert_close(state.x, least, atol=1e-5, rtol=0)


def test_rows_do_not_feel_each_other():
    function, _ = quadratics(4, 6)
    x = torch.ones(4, 6, dtype=torch.float64)
    many = minimise(function, x, iterations=12, tolerance=0.0)
    alone = minimise(function, x[:1], iterations=12, tolerance=0.0)
    torch.testing.assert_close(many.x[:1], alone.x)


def test_a_curved_valley_is_followed():
    x = torch.tensor([[-1.2, 1.0], [2.0, -1.0]], dtype=torch.float64)
    state = minimise(rosenbrock, x, iterations=300, tolerance=1e-16)
    torch.testing.assert_close(state.x, torch.ones(2, 2).double(), atol=1e-4, rtol=0)


def test_no_step_is_longer_than_allowed_and_all_are_observed():
    seen = []
    minimise(
        rosenbrock,
        torch.tensor([[-1.2, 1.0]], dtype=torch.float64),
        iterations=20,
        longest=0.1,
        observe=lambda iteration, x: seen.append((iteration, x)),
    )
    assert [iteration for iteration, _ in seen] == list(range(21))
    steps = [(b - a).norm() for (_, a), (_, b) in pairwise(seen)]
    assert max(steps) <= 0.1 + 1e-12


def test_it_ends_where_nothing_is_gained():
    seen = []
    function, least = quadratics(2, 3)
    minimise(function, least, iterations=50, tolerance=1e-9, observe=lambda *_: seen.append(1))
    assert len(seen) <= 4


def test_a_known_hessian_makes_the_first_step_right():
    function, least = quadratics(1, 5)
    state = minimise(function, torch.zeros(1, 5).double(), iterations=100, tolerance=1e-15)
    again = minimise(function, least + 0.01, iterations=1, tolerance=1e-15, hessian=state.hessian)
    assert (again.x - least).abs().max() < 0.003


def test_values_that_are_not_finite_are_not_taken():
    def function(x):
        value = torch.where(x[:, 0] > 1, torch.nan, -x[:, 0])
        return value, torch.cat([-torch.ones_like(x[:, :1]), 0 * x[:, 1:]], dim=1)

    state = minimise(function, torch.zeros(1, 2).double(), iterations=60, longest=10.0, first=3.0)
    assert 0.5 < float(state.x[0, 0]) <= 1
    assert state.value.isfinite().all()


@pytest.mark.parametrize("rows", [1, 3])
def test_no_iterations_change_nothing(rows):
    function, _ = quadratics(rows, 4)
    x = torch.ones(rows, 4, dtype=torch.float64)
    assert minimise(function, x, iterations=0).x is x
