"""Beside transformers' layers with their weights; what differs is a fault of theirs, shown here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rankone.layers import Layer, build
from rankone.ops.low_rank import nystrom_attention
from rankone.ops.sparse_attention import block_attention

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

DIM, HEADS, BLOCK = 24, 3, 4


def sample(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(0))


def copied(layer: Layer, theirs: nn.Module) -> Layer:
    """Our layer with their projections, and heads that go out as they are."""
    for name in ("query", "key", "value"):
        getattr(layer, name).load_state_dict(getattr(theirs, name).state_dict())
    with torch.no_grad():
        layer.out.weight.copy_(torch.eye(DIM))
        layer.out.bias.zero_()
    return layer


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# Longformer.


def longformer() -> Any:
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = transformers.LongformerConfig(
        hidden_size=DIM, num_attention_heads=HEADS, attention_window=[8], num_hidden_layers=1
    )
    torch.manual_seed(1)
    return LongformerSelfAttention(config, 0).eval()


def run_longformer(theirs: Any, x: Tensor, real: Tensor, few: int) -> Tensor:
    """Their way to say what is padding and what is global."""
    is_global = torch.zeros_like(real)
    is_global[:, :few] = True
    mask = torch.zeros(real.shape).masked_fill(~real, -10000.0).masked_fill(is_global, 10000.0)
    return theirs(x, mask, ~real, is_global & real, few > 0)[0]


@pytest.mark.parametrize("length", [48, 37])
@pytest.mark.parametrize("few", [0, 2])
def test_longformer_is_theirs(few, length):
    theirs, x = longformer(), sample(2, 48)
    real = torch.arange(48) < torch.tensor([[48], [length]])
    ours = build("longformer", dim=DIM, heads=HEADS, window=4, global_tokens=few)
    copied(ours, theirs)
    if few:
        for name in ("query", "key", "value"):
            their_global = getattr(theirs, f"{name}_global").state_dict()
            getattr(ours, f"global_{name}").load_state_dict(their_global)
    want = run_longformer(theirs, x, real, few)
    got = ours(x, mask=real)
    close(got[real], want[real])


def test_their_longformer_needs_a_multiple_of_its_window():
    x, real = sample(1, 45), torch.ones(1, 45, dtype=torch.bool)
    with pytest.raises(AssertionError, match="multiple of"):
        run_longformer(longformer(), x, real, 0)
    assert build("longformer", dim=DIM, heads=HEADS, window=4)(x, mask=real).shape == x.shape


# BigBird.


def bigbird(*, training: bool) -> Any:
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

    config = transformers.BigBirdConfig(
        hidden_size=DIM, num_attention_heads=HEADS, block_size=BLOCK, num_random_blocks=2,
        max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(1)
    return BigBirdBlockSparseAttention(config, seed=3).train(training)


def run_bigbird(theirs: Any, x: Tensor) -> Tensor:
    from transformers import BigBirdModel

    ones = torch.ones(x.shape[:2])
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(ones, BLOCK)
    return theirs(x, band, rows, columns, blocked, blocked)[0]


def drawn_by(theirs: Any, length: int) -> Tensor:
    """The blocks that they draw for training, [H, N, R]."""
    state = np.random.get_state()  # noqa: NPY002 - theirs draws from it
    np.random.seed(3)  # noqa: NPY002
    plan = theirs._get_rand_attn_plan(length, BLOCK, 2)
    found = theirs._bigbird_block_rand_mask_with_head(
        length, length, BLOCK, BLOCK, HEADS, plan[0], plan[1]
    )
    np.random.set_state(state)  # noqa: NPY002
    blocks = torch.tensor(np.stack(found))
    return torch.nn.functional.pad(blocks, (0, 0, 1, 1))  # the first and last see all


@pytest.mark.parametrize("length", [64, 128])
def test_bigbird_is_theirs_with_their_blocks(length):
    theirs, x = bigbird(training=True), sample(2, length)
    ours = copied(build("bigbird", dim=DIM, heads=HEADS, block=BLOCK, random=2), theirs)
    drawn = drawn_by(theirs, length)
    got = block_attention(*ours.project(x), block=BLOCK, drawn=drawn).flatten(-2)
    close(got, run_bigbird(theirs, x))


def test_their_bigbird_computes_something_else_in_evaluation_and_moves_numpys_generator():
    theirs, x = bigbird(training=True), sample(1, 128)
    in_training = run_bigbird(theirs, x)
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    in_evaluation = run_bigbird(theirs.eval(), x)
    assert float((in_training - in_evaluation).norm() / in_training.norm()) > 0.05
    run_bigbird(theirs.train(), x)
    assert not np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002
    ours = build("bigbird", dim=DIM, heads=HEADS, block=BLOCK, random=2)
    assert torch.equal(ours.train()(x), ours.eval()(x))


# Nyströmformer.


def nystromformer(length: int, **options: Any) -> Any:
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    config = transformers.NystromformerConfig(
        hidden_size=DIM, num_attention_heads=HEADS, num_landmarks=8, segment_means_seq_len=length,
        conv_kernel_size=5, **options,
    )  # fmt: skip
    torch.manual_seed(1)
    return NystromformerSelfAttention(config).eval()


def like(theirs: Any) -> Layer:
    ours = build("nystromformer", dim=DIM, heads=HEADS, landmarks=8, convolution=5)
    ours.convolution.load_state_dict(theirs.conv.state_dict())
    return copied(ours, theirs)


def test_nystromformer_is_theirs_if_matrices_begin_apart():
    theirs, x = nystromformer(64), sample(3, 64)
    theirs.init_option = "exact"
    close(like(theirs)(x), theirs(x)[0])


def test_their_nystromformer_depends_on_its_batch():
    """Their default begins the inverse of every matrix with the largest norm of the batch."""
    theirs, x = nystromformer(64), sample(3, 64)
    x[1] *= 9.0
    alone, together = theirs(x[:1])[0], theirs(x)[0][:1]
    assert float((alone - together).norm() / alone.norm()) > 1e-3
    ours = like(theirs)
    close(ours(x[:1]), ours(x)[:1])


def test_their_option_for_that_cannot_be_used():
    with pytest.raises(TypeError, match="not subscriptable"):
        nystromformer(64, inv_coeff_init_option=True)


def test_their_nystromformer_takes_padding_into_its_means():
    theirs, x = nystromformer(64), sample(1, 64)
    real = torch.arange(64) < 40
    mask = torch.zeros(1, 1, 1, 64).masked_fill(~real, -10000.0)
    other = x.clone()
    other[:, 40:] = 5.0
    want, got = (theirs(y, attention_mask=mask)[0][:, :36] for y in (x, other))
    assert float((want - got).norm() / want.norm()) > 1e-3
    ours = like(theirs)
    assert torch.equal(*(ours(y, mask=real[None])[:, :36] for y in (x, other)))


def test_their_default_is_softmax_attention():
    config = transformers.NystromformerConfig()
    assert config.segment_means_seq_len == config.num_landmarks
    q, k, v = (sample(1, 64).unflatten(-1, (HEADS, -1)) for _ in range(3))
    exact = nystrom_attention(q, k, v, landmarks=64)
    assert float((exact - nystrom_attention(q, k, v, landmarks=8)).norm()) > 0.1
