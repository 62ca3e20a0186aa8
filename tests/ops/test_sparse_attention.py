"""Windows, shared keys and blocks: the same numbers as softmax attention with a dense mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankone.ops.sparse_attention import (
    attention,
    block_attention,
    random_blocks,
    window_attention,
)
from rankone.ops.sparse_attention.near_and_far import near_and_far


def draw(*size: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=g, dtype=torch.float64)


def qkv(B: int, T: int, H: int, K: int = 4, V: int = 3, *, seed: int = 0):
    return (
        draw(B, T, H, K, seed=seed),
        draw(B, T, H, K, seed=seed + 1),
        draw(B, T, H, V, seed=seed + 2),
    )


def by_definition(q, k, v, seen):
    """Softmax over the seen keys, row by row; seen [B, H, T, S]."""
    scores = torch.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhts,bshv->bthv", weights, v)


def in_window(T: int, window: int, dilation: int, causal: bool) -> torch.Tensor:
    i, j = torch.arange(T)[:, None], torch.arange(T)[None, :]
    near = ((i - j) % dilation == 0) & ((i - j).abs() <= window * dilation)
    return near & (j <= i) if causal else near


@given(
    T=st.integers(1, 150), window=st.integers(0, 70), dilation=st.integers(1, 5),
    causal=st.booleans(), shared=st.integers(0, 3), padded=st.booleans(),
)  # fmt: skip
@settings(max_examples=60)
def test_a_window_is_softmax_attention_with_a_band(T, window, dilation, causal, shared, padded):
    q, k, v = qkv(2, T, 2)
    seen = torch.rand(2, T, generator=torch.Generator().manual_seed(3)) < (0.7 if padded else 2.0)
    more = (draw(2, shared, 2, 4, seed=7), draw(2, shared, 2, 3, seed=8)) if shared else None
    got = window_attention(
        q, k, v, window=window, dilation=dilation, causal=causal, seen=seen, shared=more
    )
    allowed = in_window(T, window, dilation, causal) & seen[:, None, None]
    if more is not None:
        k, v = torch.cat([k, more[0]], dim=1), torch.cat([v, more[1]], dim=1)
        allowed = torch.cat([allowed, allowed.new_ones(2, 1, T, shared)], dim=-1)
    torch.testing.assert_close(got, by_definition(q, k, v, allowed))


def test_shared_keys_that_are_not_there_are_not_seen():
    q, k, v = qkv(2, 20, 2)
    shared = draw(2, 3, 2, 4, seed=7), draw(2, 3, 2, 3, seed=8)
    there = torch.tensor([[True, False, True], [False, False, False]])
    got = window_attention(q, k, v, window=2, shared=shared, shared_seen=there)
    few = tuple(x[:1, [0, 2]] for x in shared)
    alone = window_attention(q[:1], k[:1], v[:1], window=2, shared=few)
    torch.testing.assert_close(got[:1], alone)
    torch.testing.assert_close(got[1:], window_attention(q[1:], k[1:], v[1:], window=2))


def dense(B: int, H: int, T: int, block: int, random: int, seed: int, lengths) -> torch.Tensor:
    """Which keys queries see, block by block as the paper says it."""
    most = -(-T // block)
    number = torch.tensor([-(-n // block) for n in lengths])
    drawn = random_blocks(number, most, H, random=random, seed=seed)
    seen = torch.zeros(B, H, most, most, dtype=torch.bool)
    for b in range(B):
        last = int(number[b]) - 1
        for h in range(H):
            for i in range(last + 1):
                if i in (0, last):
                    seen[b, h, i, : last + 1] = True
                    continue
                seen[b, h, i, [0, last, i - 1, i, i + 1]] = True
                for block_number, there in zip(*(x[b, h, i] for x in drawn), strict=True):
                    if there:
                        seen[b, h, i, block_number] = True
    seen = seen.repeat_interleave(block, 2).repeat_interleave(block, 3)[..., :T, :T]
    inside = torch.arange(T) < torch.tensor(lengths)[:, None]
    return seen & inside[:, None, None] & inside[:, None, :, None]


@pytest.mark.parametrize("random", [0, 1, 3])
@pytest.mark.parametrize(("T", "block"), [(1, 4), (9, 4), (50, 4), (61, 4), (64, 64), (200, 5)])
def test_blocks_are_softmax_attention_with_a_mask(T, block, random):
    lengths = [T, max(1, T - 9), max(1, T // 2)]
    q, k, v = qkv(3, T, 2)
    got = block_attention(
        q, k, v, block=block, random=random, seed=5, lengths=torch.tensor(lengths)
    )
    seen = dense(3, 2, T, block, random, 5, lengths)
    torch.testing.assert_close(got, by_definition(q, k, v, seen))


def test_drawn_blocks_can_be_given():
    q, k, v = qkv(1, 40, 2)
    number = torch.tensor([10])
    drawn = random_blocks(number, 10, 2, random=2, seed=1)
    assert bool(drawn.there.all())
    got = block_attention(q, k, v, block=4, drawn=drawn.which[0])
    torch.testing.assert_close(got, block_attention(q, k, v, block=4, random=2, seed=1))


@pytest.mark.parametrize("number", [1, 4, 5, 6, 7, 8, 30, 100])
def test_random_blocks_are_different_and_neither_near_nor_global(number):
    drawn = random_blocks(torch.tensor([number]), number + 2, 4, random=3, seed=9)
    for h in range(4):
        for i in range(1, number - 1):
            own = drawn.which[0, h, i][drawn.there[0, h, i]].tolist()
            pool = set(range(1, number - 1)) - {i - 1, i, i + 1}
            assert len(set(own)) == len(own) == min(3, len(pool))
            assert set(own) <= pool
        assert not drawn.there[0, h, number:].any()


def test_random_blocks_are_drawn_evenly():
    many = random_blocks(torch.tensor([60]), 60, 3000, random=3, seed=2)
    counts = many.which[0, :, 30].flatten().bincount(minlength=60).double()
    pool = [j for j in range(1, 59) if j not in (29, 30, 31)]
    expected = 9000 / len(pool)
    chi_squared = float(((counts[pool] - expected) ** 2 / expected).sum())
    assert chi_squared < 95  # 55 blocks: 99.9 % of even draws


def test_random_blocks_of_a_sequence_do_not_depend_on_its_batch():
    both = random_blocks(torch.tensor([20, 9]), 20, 2, random=3, seed=4)
    alone = random_blocks(torch.tensor([9]), 9, 2, random=3, seed=4)
    assert torch.equal(both.which[1, :, :9], alone.which[0])
    other = random_blocks(torch.tensor([9]), 9, 2, random=3, seed=5)
    assert not torch.equal(other.which, alone.which)


@pytest.mark.parametrize("window", [0, 3, 400])
@pytest.mark.parametrize("extra", [0, 7])
def test_near_and_far_is_one_softmax(window, extra):
    T, S, R = 300, 300 + extra, 11
    q, k, v = draw(2, T, 2, 4), draw(2, S, 2, 4, seed=1), draw(2, S, 2, 3, seed=2)
    far_k, far_v = draw(2, R, 2, 4, seed=3), draw(2, R, 2, 3, seed=4)
    visible = torch.arange(T) * R // T
    near_seen = torch.rand(2, S, generator=torch.Generator().manual_seed(5)) < 0.8
    far_seen = torch.rand(2, R, generator=torch.Generator().manual_seed(6)) < 0.8
    got = near_and_far(
        q, k, v, far_k, far_v, window=window, visible=visible, near_seen=near_seen,
        far_seen=far_seen,
    )  # fmt: skip
    i, j = torch.arange(extra, S)[:, None], torch.arange(S)[None, :]
    near = ((j <= i) & (j >= i - window)) & near_seen[:, None, None]
    far = (torch.arange(R) < visible[:, None]) & far_seen[:, None, None]
    seen = torch.cat([near, far], dim=-1)
    want = by_definition(q, torch.cat([k, far_k], 1), torch.cat([v, far_v], 1), seen)
    torch.testing.assert_close(got, want)


def test_a_query_that_sees_nothing_gets_zeros_and_no_nan_gradient():
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in qkv(1, 3, 1))
    seen = torch.tensor([[True, True, True], [False, False, False], [True, False, True]])
    output = attention(q, k, v, seen=seen)
    assert not output[0, 0, 1].any()
    for grad in torch.autograd.grad(output.sum(), (q, k, v)):
        assert bool(torch.isfinite(grad).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1}, "window must be at least 0, got -1"),
        ({"window": 1, "dilation": 0}, "dilation must be at least 1, got 0"),
    ],
)
def test_windows_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        window_attention(*qkv(1, 3, 1), **options)


def test_blocks_that_cannot_be():
    with pytest.raises(
        ValueError, match="block must be at least 1 and random at least 0, got 0, 3"
    ):
        block_attention(*qkv(1, 3, 1), block=0)
