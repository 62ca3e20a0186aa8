import math

import pytest
import torch

from rankone.tasks.noise import Categorical, Fixed, Uniform

NOISES = [
    Uniform(0, 5),
    Uniform(2, 3),
    Uniform(1, 1),
    Uniform(0, 0),
    Categorical((1, 3)),
    Categorical((3, 1, 5)),
    Fixed(0.5),
    Fixed(0),
]
each_noise = pytest.mark.parametrize("noise", NOISES, ids=repr)


@each_noise
def test_mean_square_is_that_of_the_quadrature(noise):
    points, weights = noise.quadrature()
    assert float(weights.sum()) == pytest.approx(1, rel=1e-12)
    assert float((weights * points**2).sum()) == pytest.approx(noise.mean_square, rel=1e-12)
    assert points.dtype == weights.dtype == torch.float64
    assert bool((points >= 0).all())
    assert bool((points <= noise.largest).all())


@each_noise
def test_mean_square_is_that_of_the_quantiles(noise):
    u = (torch.arange(30_000, dtype=torch.float64) + 0.5) / 30_000
    sigma = noise.quantile(u)
    assert float(sigma.square().mean()) == pytest.approx(noise.mean_square, rel=1e-6)
    assert float(sigma.max()) <= noise.largest


def test_quadrature_of_a_smooth_function_is_exact():
    points, weights = Uniform(1, 4).quadrature()
    assert float((weights * points.exp()).sum()) == pytest.approx(
        (math.exp(4) - math.exp(1)) / 3, rel=1e-12
    )


def test_uniform_quantiles_run_from_low_to_high():
    u = torch.tensor([0.0, 0.25, 1.0])
    assert Uniform(1, 3).quantile(u).tolist() == [1.0, 1.5, 3.0]


def test_categorical_quantiles_take_equal_parts_in_order():
    u = torch.tensor([[0.0, 0.3], [0.34, 1.0]])
    assert Categorical((3, 1, 5)).quantile(u).tolist() == [[3.0, 3.0], [1.0, 5.0]]


def test_fixed_quantiles_are_the_value():
    assert Fixed(0.5).quantile(torch.rand(3)).tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    "make",
    [lambda s: Uniform(0, s), lambda s: Uniform(s, 9), lambda s: Categorical((1, s)), Fixed],
    ids=["high", "low", "categorical", "fixed"],
)
def test_what_is_not_a_standard_deviation_is_refused(make, bad):
    with pytest.raises(ValueError, match=f"standard deviation >= 0, got {bad}"):
        make(bad)


def test_an_interval_upside_down_is_refused():
    with pytest.raises(ValueError, match="high must be >= low, got low=3, high=2"):
        Uniform(3, 2)


def test_a_choice_among_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one standard deviation"):
        Categorical(())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed("1"), "got '1'"),
        (lambda: Categorical(3), r"as \(1, 3\), got 3"),
        (lambda: Categorical(("a",)), "got 'a'"),
        (lambda: Uniform(0, None), "got None"),
    ],
)
def test_what_is_no_number_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.usefixtures("unchecked")
def test_a_list_of_values_is_as_good_as_a_tuple():
    assert Categorical([1, 3]) == Categorical((1, 3))
    assert hash(Categorical([1, 3])) == hash(Categorical((1, 3)))
