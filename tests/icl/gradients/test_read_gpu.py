"""The GPU's read-out equals the model's own: natively with CUDA, else in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from rankone.icl.gradients.fused_gpu import _interpreted
from rankone.icl.gradients.read_gpu import weights_after_layers
from rankone.icl.model import LinearTransformer
from rankone.tasks.noise import Uniform
from rankone.tasks.regression import NoisyRegression

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = [pytest.mark.gpu] if CUDA else []
if not CUDA and not _interpreted():
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

# members, streams, batch, layers, heads, dim
SHAPES = [(1, 1, 1, 1, 1, 3), (3, 2, 7, 2, 1, 10), (2, 2, 5, 3, 2, 4), (2, 1, 3, 4, 1, 16)]
if CUDA:
    SHAPES.append((2, 2, 40_000, 7, 1, 10))


@pytest.mark.parametrize(("members", "streams", "batch", "layers", "heads", "dim"), SHAPES)
def test_every_layer_is_read_in_float64(members, streams, batch, layers, heads, dim):
    task = NoisyRegression(dim=dim, context=2 * dim, noise=Uniform(0, 2))
    gram = torch.stack(
        [task.sample_gram(batch, generator=s, dtype=torch.float64).gram for s in range(streams)]
    )
    models = [
        LinearTransformer(
            kind="full", layers=layers, dim=dim, heads=heads, scale=0.02, generator=r
        ).double()
        for r in range(members)
    ]
    P = torch.stack([m.matrices()[0] for m in models]).detach()
    Q = torch.stack([m.matrices()[1] for m in models]).detach()
    stream = torch.arange(members) % streams
    got = weights_after_layers(*(t.to(DEVICE) for t in (P, Q, gram, stream))).cpu()
    with torch.no_grad():
        want = torch.stack(
            [
                m.implicit_weights(gram[s], every_layer=True)
                for m, s in zip(models, stream.tolist(), strict=True)
            ]
        )
    assert got.shape == want.shape
    scale = want.abs().amax((1, 2, 3), keepdim=True)
    assert torch.all((got - want).abs() <= 1e-12 * scale)
