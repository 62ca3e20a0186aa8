import pytest
import torch

from rankone.icl.gdpp import eigenvalue_nodes, gap_to_constant_ridge, population_loss
from rankone.icl.model import LinearTransformer
from rankone.tasks.noise import Categorical, Fixed, Uniform
from rankone.tasks.regression import NoisyRegression

W_XX = torch.tensor([-0.0157, -0.02, 0.003], dtype=torch.float64)
W_YX = torch.tensor([-0.0223, -0.08, -0.1], dtype=torch.float64)


@pytest.mark.parametrize("noise", [Fixed(0), Uniform(0, 5), Categorical((1, 3))], ids=repr)
@pytest.mark.parametrize("layers", [1, 3])
def test_population_loss_is_that_of_the_model(noise, layers):
    w_xx, w_yx = W_XX[:layers], W_YX[:layers]
    p = torch.stack([w_xx, w_yx], dim=-1)[:, None]
    model = LinearTransformer.from_parameters("gd++", p, torch.ones_like(p[..., :1]), 10)
    task = NoisyRegression(dim=10, context=20, noise=noise)
    gram, weights, _ = task.sample_gram(40_000, generator=3, dtype=torch.float64)
    with torch.no_grad():
        loss = (model.implicit_weights(gram) - weights).square().sum(1) / 2
    expected = population_loss(w_xx, w_yx, eigenvalue_nodes(10, 20), noise.mean_square, 10)
    error = float(loss.std()) / 200
    assert float(loss.mean()) == pytest.approx(float(expected), abs=4 * error)


def test_population_loss_of_many_models_is_that_of_each():
    values = eigenvalue_nodes(4, 9, count=50, samples=100)
    both = population_loss(torch.stack([W_XX, W_YX]), torch.stack([W_YX, W_XX]), values, 2.0, 4)
    assert both.tolist() == [
        float(population_loss(W_XX, W_YX, values, 2.0, 4)),
        float(population_loss(W_YX, W_XX, values, 2.0, 4)),
    ]


def test_eigenvalue_nodes_have_the_mean_of_the_eigenvalues():
    values = eigenvalue_nodes(10, 20)
    assert values.shape == (1000,)
    assert float(values.mean()) == pytest.approx(20, rel=5e-3)
    assert bool((values.diff() >= 0).all())


@pytest.mark.parametrize(
    ("layers", "variance", "gap", "tolerance"),
    [(2, 25 / 3, 0.0118, 3e-4), (2, 5.0, 0.0267, 5e-4), (3, 25 / 3, 5e-5, 2e-5)],
)
def test_gdpp_stays_above_constant_ridge_by_the_known_gap(layers, variance, gap, tolerance):
    found = gap_to_constant_ridge(layers, dim=10, context=20, variance=variance)
    assert found >= 0
    assert found == pytest.approx(gap, abs=tolerance)


def test_one_layer_of_gdpp_is_its_closed_form():
    dim, context, variance = 4, 10, 2.0
    found = gap_to_constant_ridge(1, dim=dim, context=context, variance=variance)
    values = eigenvalue_nodes(dim, context)
    ridge = dim / 2 * float((variance / (values + variance)).mean())
    best = dim / 2 * (1 - context / (context + dim + 1 + variance))
    assert found == pytest.approx(best - ridge, rel=2e-2)
