"""The fused assembly of Gram matrices is the plain one, to rounding."""

import pytest
import torch

from rankone.tasks.noise import Categorical, Fixed, Uniform
from rankone.tasks.regression import NoisyRegression

NOISES = [Uniform(0, 5), Categorical((1, 3)), Fixed(0)]


def draw(task, batch, impl, *, streams=2, dtype=torch.float64, **options):
    generators = [torch.Generator().manual_seed(seed) for seed in range(streams)]
    return task.sample_spiked(batch, NOISES, generators, dtype, impl=impl, **options)


@pytest.mark.parametrize(("dim", "context"), [(10, 20), (4, 3), (1, 3)])
@pytest.mark.parametrize("batch", [1, 16, 61])
@pytest.mark.parametrize("spiked", [True, False])
def test_fused_equals_plain(dim, context, batch, spiked):
    task = NoisyRegression(dim=dim, context=context, noise=NOISES[0])
    options = {"units": (1.5, torch.tensor([2.0, 3.0, 0.5], dtype=torch.float64))}
    if spiked and batch > 1:
        options |= {"spikes": (1.5, 3.0), "share": 0.4}
    (fused, weight), (plain, expected) = (
        draw(task, batch, impl, **options) for impl in ("fused_cpu", "reference")
    )
    for ours, truth in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weight, expected, rtol=1e-11, atol=0)


def test_single_precision_stays_single_and_close():
    task = NoisyRegression(dim=10, context=20, noise=NOISES[0])
    options = {"spikes": (2.0,), "share": 0.25, "dtype": torch.float32}
    fused, weight = draw(task, 100, "fused_cpu", **options)
    plain, expected = draw(task, 100, "reference", **options)
    assert fused.gram.dtype == weight.dtype == torch.float32
    scale = plain.gram.abs().amax((-1, -2), keepdim=True)
    assert bool(((fused.gram - plain.gram).abs() <= 1e-6 * scale).all())
    torch.testing.assert_close(weight, expected, rtol=1e-4, atol=0)


def test_what_is_fused_is_symmetric_and_repeats_to_the_bit():
    task = NoisyRegression(dim=10, context=20, noise=NOISES[0])
    first, again = (draw(task, 50, "fused_cpu", spikes=(2.0,), share=0.5)[0] for _ in range(2))
    assert torch.equal(first.gram, again.gram)
    assert torch.equal(first.gram, first.gram.mT)


def test_a_covariance_or_an_unknown_implementation_is_refused():
    task = NoisyRegression(dim=2, context=3, noise=NOISES[0], covariance=2 * torch.eye(2))
    with pytest.raises(ValueError, match="without covariance"):
        draw(task, 4, "fused_cpu")
    with pytest.raises(ValueError, match="'reference' or 'fused_cpu', got 'fast'"):
        draw(task, 4, "fast")
