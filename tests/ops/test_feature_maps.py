import math

import pytest
import torch

from rankone.ops import feature_maps as fm


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", fm.MAPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_maps_keep_shape_and_dtype(name, dtype):
    x = normal(2, 3, 5).to(dtype)
    features = fm.MAPS[name](x)
    assert features.shape[:2] == (2, 3)
    assert features.dtype == dtype
    assert bool(torch.isfinite(features).all())


@pytest.mark.parametrize("name", fm.MAPS)
def test_maps_have_the_gradient_of_finite_differences(name):
    x = (normal(4, 5) + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(fm.MAPS[name], (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_elu_plus_one_keeps_its_digits_far_below_zero(dtype):
    x = torch.linspace(-9, 9, 200).to(dtype).requires_grad_()
    y = fm.elu_plus_one(x)
    y.sum().backward()
    exact = torch.where(x > 0, x.double() + 1, x.double().exp())
    slope = torch.where(x > 0, 1.0, x.double().exp())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), exact, rtol=eps, atol=1e-7)
    torch.testing.assert_close(x.grad.double(), slope, rtol=eps, atol=1e-7)
    assert bool((y > 0).all())
    naive = torch.nn.functional.elu(x) + 1
    assert bool((naive[:10] == 0).any())  # what it is not


def test_elu_plus_one_does_not_overflow_and_neither_does_its_gradient():
    x = torch.tensor([1e4, 500.0], requires_grad=True)
    fm.elu_plus_one(x).sum().backward()
    assert x.grad.tolist() == [1, 1]


@pytest.mark.parametrize("nu", [1, 2, 3])
def test_dpfp_is_products_of_neighbours_both_signs_used(nu):
    x = normal(7, 4)
    r = torch.cat([x.clamp_min(0), (-x).clamp_min(0)], dim=1)
    expected = [
        [r[b, i] * r[b, (i - s) % 8] for s in range(1, nu + 1) for i in range(8)] for b in range(7)
    ]
    torch.testing.assert_close(fm.dpfp(x, nu), torch.tensor(expected, dtype=torch.float64))
    assert bool((fm.dpfp(-x.abs(), nu) != 0).any())
    with pytest.raises(ValueError, match="nu must be from 1 to 2 K - 1 = 7, got 8"):
        fm.dpfp(x, 8)


def test_taylor_is_the_beginning_of_the_exponential():
    q, k = normal(6, 5), normal(6, 5, seed=1)
    inner = (q * k).sum(1)
    got = (fm.taylor(q) * fm.taylor(k)).sum(1)
    torch.testing.assert_close(got, 1 + inner + inner**2 / 2)


def draws(make, count, features, dim):
    g = generator()
    return [make(features, dim, generator=g, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("make", [fm.gaussian_projection, fm.orthogonal_projection])
@pytest.mark.parametrize("kernel", ["favor", "random_fourier"])
def test_random_features_are_unbiased(make, kernel):
    q, k = 0.5 * normal(4, seed=1), 0.5 * normal(4, seed=2)
    found = []
    for w in draws(make, 4000, 6, 4):
        if kernel == "favor":
            shift = (q @ w.mT - q.square().sum() / 2).max().exp()  # what is subtracted of a query
            found.append(shift * (fm.favor(q, w, query=True) * fm.favor(k, w, query=False)).sum())
        else:
            found.append((fm.random_fourier(q, w) * fm.random_fourier(k, w)).sum())
    found = torch.stack(found)
    truth = (q @ k).exp() if kernel == "favor" else (-(q - k).square().sum() / 2).exp()
    error = float(found.std()) / math.sqrt(len(found))
    assert abs(float(found.mean() - truth)) < 4 * error
    assert error < 0.02


def test_orthogonal_rows_have_less_variance_than_independent_ones():
    q, k = normal(4, seed=1) / 2, normal(4, seed=2) / 2
    spread = {}
    for make in (fm.gaussian_projection, fm.orthogonal_projection):
        found = [
            (fm.random_fourier(q, w) * fm.random_fourier(k, w)).sum()
            for w in draws(make, 3000, 4, 4)
        ]
        spread[make] = float(torch.stack(found).var())
    assert spread[fm.orthogonal_projection] < 0.8 * spread[fm.gaussian_projection]


def test_rows_are_orthogonal_in_blocks_and_normal_each():
    w = torch.stack(draws(fm.orthogonal_projection, 4000, 7, 3))
    assert w.shape == (4000, 7, 3)
    for block in (w[:, :3], w[:, 3:6]):
        inner = block @ block.mT
        off = inner - torch.diag_embed(inner.diagonal(dim1=1, dim2=2))
        assert float(off.abs().max()) < 1e-12
    # The sign of QR would show in the mean of the diagonal, lengths in the second moments.
    assert float(w.mean(0).abs().max()) < 5 / math.sqrt(4000)
    second = torch.einsum("nfi,nfj->fij", w, w) / 4000
    assert float((second - torch.eye(3, dtype=torch.float64)).abs().max()) < 0.15


def test_favor_of_keys_does_not_look_at_other_keys():
    w = fm.orthogonal_projection(16, 4, generator=generator(), dtype=torch.float64)
    k = normal(5, 4)
    alone = torch.cat([fm.favor(row, w, query=False) for row in k.split(1)])
    torch.testing.assert_close(fm.favor(k, w, query=False), alone)
    assert bool((alone > 0).all())


@pytest.mark.usefixtures("unchecked")
def test_projections_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"shape \[F, K\] or \[H, F, K\] with K = 4.*got \(8, 3\)"):
        fm.favor(normal(2, 4), normal(8, 3), query=True)
    with pytest.raises(ValueError, match=r"heads of x.*got \(3, 8, 4\) for \(5, 2, 4\)"):
        fm.favor(normal(5, 2, 4), normal(3, 8, 4), query=True)
    with pytest.raises(ValueError, match="at least 1, got 0 and 3"):
        fm.orthogonal_projection(0, 3, generator=generator())
