import math

import pytest
import torch

from rankone.icl.ahn.problem import Problem
from rankone.icl.ahn.spectrum import degree, expected_loss, quadrature, residual, wishart_moment


@pytest.mark.parametrize(("d", "n"), [(1, 1), (2, 5), (5, 2), (5, 20), (3, 3)])
def test_moments_of_wishart_matrices(d, n):
    """The first four: Letac and Massam 2004; they are symmetric in d and n."""
    assert wishart_moment(0, d, n) == d
    assert wishart_moment(1, d, n) == d * n
    assert wishart_moment(2, d, n) == d * n * (d + n + 1)
    assert wishart_moment(3, d, n) == d * n * (d * d + n * n + 3 * d * n + 3 * d + 3 * n + 4)
    for k in range(1, 8):
        assert wishart_moment(k, d, n) == wishart_moment(k, n, d)


@pytest.mark.parametrize("degree", [1, 2, 5, 13, 26])
def test_a_single_feature_has_the_moments_of_chi_square(degree):
    n = 7
    assert wishart_moment(degree, 1, n) == math.prod(n + 2 * i for i in range(degree))


@pytest.mark.parametrize("context", [2, 4, 5, 20])
def test_quadrature_gives_all_moments_of_its_degree(context):
    s, weight = quadrature(5, context, 14)
    assert (weight > 0).all()
    for k in range(28):
        exact = float(wishart_moment(k, 5, context) / context**k)
        assert float((weight * s**k).sum()) == pytest.approx(exact, rel=1e-9)


def test_the_expected_loss_is_that_of_spiked_prompts_and_not_of_a_plain_sample():
    """The published multiples: 0.0513 in expectation, below 0.001 on most samples of 20,000."""
    a = torch.tensor([-0.38, -2.40, -9.55], dtype=torch.float64)
    b = torch.tensor([0.90, 0.57], dtype=torch.float64)
    exact = float(expected_loss(a, b, context=20))
    assert exact == pytest.approx(0.0513, abs=1e-4)
    problem = Problem()
    found = {}
    for spikes in ((), problem.spikes(13)):
        grams, importance = problem.sample_grams(8000, generator=5, spikes=spikes)
        s = torch.linalg.eigvalsh(grams[:, :, 0].permute(2, 0, 1))
        loss = residual(a, b, s.flatten()).view(8000, 5).square().sum(1)
        found[bool(spikes)] = float((importance[0] * loss).mean())
    assert found[True] == pytest.approx(exact, rel=0.25)
    assert found[False] < 0.001


def test_one_layer_has_a_closed_form():
    """E tr (1 + a S)² = d (1 + 2 a + a² (n + d + 1) / n)."""
    a = torch.tensor([[-0.3], [-0.8]], dtype=torch.float64)
    expected = 5 * (1 + 2 * a + a.square() * 26 / 20)
    torch.testing.assert_close(expected_loss(a, a[:, :0], context=20), expected[:, 0])


def test_degrees_are_those_of_the_polynomials():
    assert [degree(layers, 0) for layers in (1, 2, 3)] == [1, 2, 3]
    assert [degree(layers, layers - 1) for layers in (1, 2, 3, 4)] == [1, 4, 13, 40]
    far = torch.tensor([1e5, 2e5], dtype=torch.float64)
    a, b = torch.full((3,), -1.0).double(), torch.full((2,), -1.0).double()
    growth = residual(a, b, far).abs().log().diff() / math.log(2)
    assert float(growth) == pytest.approx(13, abs=1e-3)
