"""Projected keys and landmarks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.test_sparse_attention import by_definition, draw, qkv
from rankone.ops.low_rank import (
    nystrom_attention,
    projected_attention,
    pseudo_inverse,
    segment_means,
)


def test_the_iteration_finds_the_pseudo_inverse():
    a = draw(3, 2, 8, 8).softmax(-1)
    found = pseudo_inverse(a, iterations=20)
    torch.testing.assert_close(found, torch.linalg.pinv(a), rtol=1e-6, atol=1e-6)


def test_an_inverse_does_not_depend_on_others_in_the_batch():
    a = draw(5, 8, 8).softmax(-1)
    for n in range(5):
        torch.testing.assert_close(pseudo_inverse(a)[n], pseudo_inverse(a[n]))


@given(T=st.integers(1, 60), number=st.integers(1, 20), n=st.integers(1, 60))
@settings(max_examples=40)
def test_segments_are_as_equal_as_can_be(T, number, n):
    n = min(n, T)
    x = draw(1, T, 2, 3)
    means, there = segment_means(x, torch.tensor([n]), number)
    for m in range(number):
        begin, end = m * n // number, (m + 1) * n // number
        assert bool(there[0, m]) == (end > begin)
        if end > begin:
            torch.testing.assert_close(means[0, m], x[0, begin:end].mean(0))
    sizes = {(m + 1) * n // number - m * n // number for m in range(number)}
    assert max(sizes) - min(sizes) <= 1


def test_means_in_float32_do_not_lose_their_digits_in_long_sequences():
    x = (draw(1, 200_000, 1, 2) + 3).float()
    means, _ = segment_means(x, torch.tensor([200_000]), 2000)
    want = x.double().view(1, 2000, 100, 1, 2).mean(2)
    torch.testing.assert_close(means.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("T", [16, 30, 33])
def test_nystrom_is_the_formula(T):
    q, k, v = qkv(2, T, 2)
    bounds = [m * T // 8 for m in range(9)]
    few = [torch.stack([x[:, a:b].mean(1) for a, b in pairwise(bounds)], 1) for x in (q, k)]

    def weights(a, b):
        return (torch.einsum("bthk,bshk->bhts", a, b) / 2).softmax(-1)

    matrix = weights(q, few[1]) @ torch.linalg.pinv(weights(*few)) @ weights(few[0], k)
    want = torch.einsum("bhts,bshv->bthv", matrix, v)
    got = nystrom_attention(q, k, v, landmarks=8, iterations=20)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_with_as_many_landmarks_as_tokens_it_is_softmax_attention():
    q, k, v = qkv(2, 20, 2)
    want = by_definition(q, k, v, torch.ones(2, 2, 20, 20, dtype=torch.bool))
    for landmarks in (20, 50):
        torch.testing.assert_close(nystrom_attention(q, k, v, landmarks=landmarks), want)
    # Also where a longer sequence is beside it.
    lengths = torch.tensor([20, 7])
    got = nystrom_attention(q, k, v, landmarks=8, lengths=lengths)[1, :7]
    torch.testing.assert_close(
        got,
        by_definition(*(x[1:, :7] for x in (q, k, v)), torch.ones(1, 2, 7, 7, dtype=torch.bool))[0],
    )


def test_projections_that_are_the_identity_give_softmax_attention():
    q, k, v = qkv(2, 12, 2)
    eye = torch.eye(12, dtype=torch.float64)[None]
    want = by_definition(q, k, v, torch.ones(2, 2, 12, 12, dtype=torch.bool))
    torch.testing.assert_close(projected_attention(q, k, v, eye, eye), want)


def test_landmarks_that_cannot_be():
    with pytest.raises(ValueError, match="landmarks must be at least 1"):
        nystrom_attention(*qkv(1, 3, 1), landmarks=0)
