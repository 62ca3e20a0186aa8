"""Windows and blocks by FlexAttention: its lists are the pattern, and its numbers ours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankone.errors import BackendUnavailableError
from rankone.layers import build
from rankone.ops.sparse_attention import block_attention, flex, random_blocks, window_attention
from rankone.ops.sparse_attention.blocks import _all_slots, _table

SIDE = flex.SIDE
uncompiled = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def draw(*size: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=g, dtype=torch.float64)


def qkv(T: int, *, B: int = 2, H: int = 2, K: int = 16, V: int = 32) -> tuple[Tensor, ...]:
    return draw(B, T, H, K), draw(B, T, H, K, seed=1), draw(B, T, H, V, seed=2)


@pytest.fixture
def by_flex(monkeypatch):
    """Let `impl="flex"` be on the CPU, where it computes with a dense mask."""
    monkeypatch.setattr(flex, "choose", lambda impl, *_, **__: impl)


def densely(q, k, v, mask, *, scale, with_sums=False, side=SIDE):
    """What FlexAttention computes, with a gradient on the CPU too."""
    seen = entries(mask, q.shape[2], *q.shape[:2])
    scores = (q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).double()
    scores = scores.masked_fill(~seen, -torch.inf)
    sums = scores.logsumexp(-1)
    weights = torch.exp(scores - sums.nan_to_num(0.0, neginf=0.0)[..., None])
    output = weights.to(v.dtype) @ v
    return (output, sums) if with_sums else output


def entries(mask, T: int, B: int = 1, H: int = 1) -> Tensor:
    """Which keys each query may see by the mask's function, [B, H, T, T]."""
    b, h, i = torch.arange(B), torch.arange(H), torch.arange(T)
    return mask.mask_mod(
        b[:, None, None, None], h[:, None, None], i[:, None], i
    ).expand(B, H, T, T)  # fmt: skip


def in_blocks(seen: Tensor, side: int, number: int, *, whole: bool) -> Tensor:
    """Whether any entry of a block is seen, or all of those that there are."""
    missing = number * side - seen.shape[-1]
    seen = torch.nn.functional.pad(seen, (0, missing, 0, missing), value=whole)
    blocks = seen.unflatten(-1, (number, side)).unflatten(-3, (number, side))
    return blocks.all(-1).all(-2) if whole else blocks.any(-1).any(-2)


def listed(count: Tensor, index: Tensor, number: int) -> Tensor:
    """[…, N, N]: which blocks stand in the lists."""
    found = torch.zeros(*index.shape[:-1], number, dtype=torch.bool)
    valid = torch.arange(index.shape[-1]) < count[..., None]
    assert int(valid.sum()) == int(count.sum())
    for place in valid.nonzero().tolist():
        block = int(index[tuple(place)])
        assert not found[(*place[:-1], block)], "twice in a list"
        found[(*place[:-1], block)] = True
    return found


@given(
    T=st.integers(1, 900), window=st.integers(0, 500), causal=st.booleans(), all_seen=st.booleans()
)
@settings(max_examples=25, deadline=None)
def test_lists_hold_the_blocks_of_the_window_and_no_others(T, window, causal, all_seen):
    seen = None if all_seen else torch.ones(1, T, dtype=torch.bool)
    mask = flex.window_mask(T, window=window, causal=causal, seen=seen, device=torch.device("cpu"))
    number = -(-T // SIDE)
    want = entries(mask, T)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    assert torch.equal(want[0, 0], ((i - j).abs() <= window) & ((j <= i) | (not causal)))
    partly = listed(mask.kv_num_blocks, mask.kv_indices, number)
    across = listed(mask.q_num_blocks, mask.q_indices, number)
    if all_seen:
        wholly = listed(mask.full_kv_num_blocks, mask.full_kv_indices, number)
        assert not (wholly & partly).any()
        assert not (wholly & ~in_blocks(want, SIDE, number, whole=True)).any()
        partly = partly | wholly
        across = across | listed(mask.full_q_num_blocks, mask.full_q_indices, number)
    need = in_blocks(want, SIDE, number, whole=False)
    assert not (need & ~partly).any()
    assert torch.equal(across, partly.mT)
    if T % SIDE == 0:
        assert torch.equal(partly, need)


@pytest.mark.parametrize("shared", [0, 3])
@pytest.mark.parametrize(
    ("T", "window", "dilation", "causal"),
    [
        (1, 0, 1, False),
        (200, 30, 1, True),
        (300, 7, 3, False),
        (129, 0, 1, False),
        (50, 60, 2, True),
    ],
)
@pytest.mark.parametrize("dense", [False, True])
@uncompiled
@pytest.mark.usefixtures("by_flex")
def test_windows_are_those_of_the_form_in_chunks(
    T, window, dilation, causal, shared, dense, monkeypatch
):
    if dense:
        monkeypatch.setattr(flex, "attend", densely)
    heads = qkv(T)
    seen = torch.rand(2, T, generator=torch.Generator().manual_seed(3)) < 0.6
    options = {"window": window, "dilation": dilation, "causal": causal, "seen": seen}
    if shared:
        options["shared"] = (draw(2, shared, 2, 16, seed=5), draw(2, shared, 2, 32, seed=6))
        options["shared_seen"] = torch.tensor([[True, False, True], [False, False, False]])
    for x in heads:
        x.requires_grad_(dense)
    found = []
    for impl in ("flex", "chunked"):
        output = window_attention(*heads, **options, impl=impl)
        grads = torch.autograd.grad(output.square().sum(), heads) if dense else ()
        found.append((output, *grads))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)  # its sums are in float32


@pytest.mark.parametrize(("T", "block"), [(256, 32), (200, 32), (64, 64), (500, 64)])
@uncompiled
@pytest.mark.usefixtures("by_flex")
def test_blocks_are_those_of_the_form_in_chunks(T, block):
    heads = qkv(T, B=3)
    lengths = torch.tensor([T, max(1, T - block - 3), 1])
    options = {"block": block, "random": 2, "seed": 4, "lengths": lengths}
    got, want = (block_attention(*heads, **options, impl=impl) for impl in ("flex", "chunked"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_lists_of_blocks_are_the_table():
    number, side, most = torch.tensor([9, 5]), 32, 9
    seen = _all_slots(number, most, random_blocks(number, most, 2, random=2, seed=1))
    table = _table(seen, number)
    mask = flex.block_mask(most * side, table, number * side, side=side)
    assert torch.equal(listed(mask.kv_num_blocks, mask.kv_indices, most), table)
    assert torch.equal(listed(mask.q_num_blocks, mask.q_indices, most), table.mT)
    want = table.repeat_interleave(side, -1).repeat_interleave(side, -2)
    assert torch.equal(entries(mask, most * side, 2, 2), want)


def test_flex_is_refused_where_it_cannot_be():
    heads = qkv(8)
    with pytest.raises(BackendUnavailableError, match="needs an NVIDIA GPU, got tensors on cpu"):
        window_attention(*heads, window=2, impl="flex")
    with pytest.raises(ValueError, match="impl must be one of auto, chunked, flex, got 'dense'"):
        block_attention(*heads, block=4, impl="dense")
    cuda = torch.device("cuda")
    with pytest.raises(BackendUnavailableError, match="has no float64"):
        flex.choose("flex", cuda, dtype=torch.float64)
    with pytest.raises(BackendUnavailableError, match="needs blocks of 32, 64 or 128 tokens"):
        flex.choose("flex", cuda, dtype=torch.float32, fits=False)
    assert flex.choose("auto", cuda, dtype=torch.float32) == "chunked"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "causal", "options"),
    [
        ("longformer", False, {"window": 100}),
        ("longformer", True, {"window": 300, "dilation": 2}),
        ("longformer", False, {"window": 64, "global_tokens": 3}),
        ("bigbird", False, {"block": 64}),
        ("bigbird", False, {"block": 32}),
        ("long_short", False, {"window": 100}),
    ],
    ids=str,
)
@pytest.mark.parametrize("T", [70, 1024, 1500])
def test_on_a_gpu_layers_are_the_same_by_flex(name, causal, options, T):
    torch.manual_seed(0)
    layer = build(name, dim=128, heads=4, causal=causal, **options).cuda()
    x = torch.randn(2, T, 128, device="cuda")
    mask = torch.arange(T, device="cuda") < torch.tensor([[T], [T - 30]], device="cuda")
    found = []
    for impl in ("chunked", "flex"):
        layer.impl = impl
        given_x = x.clone().requires_grad_()
        y = layer(given_x, mask=mask)
        grads = torch.autograd.grad(y.square().mean(), [given_x, *layer.parameters()])
        found.append((y, *grads))
    for want, got in zip(*found, strict=True):
        error = (got - want).norm() / want.norm().clamp_min(1e-12)
        assert float(error) < 5e-3
