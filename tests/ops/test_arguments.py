"""What the operations refuse, and what they say."""

from __future__ import annotations

import pytest
import torch

from ops.cases import call, inputs
from rankone.errors import BackendUnavailableError
from rankone.ops import IMPLEMENTATIONS, choose, linear_attention

pytestmark = pytest.mark.usefixtures("unchecked")
SHAPE = (2, 8, 3, 4, 5)


def ints(*offsets):
    return torch.tensor(offsets)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 8, 4)}, r"q must have shape \[B, T, H, K\], got \(2, 8, 4\)"),
        (
            {"k": torch.zeros(2, 7, 3, 4)},
            r"k must have shape \[B, T, H, K\] = \(2, 8, 3, 4\), got \(2, 7, 3, 4\)",
        ),
        (
            {"v": torch.zeros(2, 8, 2, 5)},
            r"v must have shape \[B, T, H, V\] = \(2, 8, 3, V >= 1\), got \(2, 8, 2, 5\)",
        ),
        ({"v": torch.zeros(2, 8, 3, 0)}, "V >= 1"),
        ({"q": torch.zeros(2, 0, 3, 4)}, "q must have no empty axis"),
        ({"beta": torch.zeros(2, 8)}, r"beta must have shape \[B, T, H\] = \(2, 8, 3\)"),
        ({"decay": torch.zeros(2, 8, 3, 1)}, r"decay must have shape \[B, T, H\]"),
        (
            {"state": torch.zeros(2, 3, 5, 4)},
            r"initial_state \(kv\) must have shape \[N, H, K, V\] = \(2, 3, 4, 5\)",
        ),
        ({"q": torch.zeros(2, 8, 3, 4, dtype=torch.int64)}, "q must be one of .*got torch.int64"),
        ({"v": torch.zeros(2, 8, 3, 5).double()}, "v must be torch.float32 .*got torch.float64"),
        ({"state": torch.zeros(2, 3, 4, 5).half()}, "must be torch.float32 .*got torch.float16"),
        ({"k": torch.zeros(2, 8, 3, 4, device="meta")}, "device of q, cpu, got meta"),
        ({"decay": torch.full((2, 8, 3), 0.5)}, "log space and must be <= 0, got 0.5"),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_are_refused(change, message):
    tensors = inputs("delta_decay", SHAPE, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        call("delta_decay", tensors | change)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (ints(0, 5), r"rise from 0 to T = 8 and never fall, got \[0, 5\]"),
        (ints(1, 8), "rise from 0"),
        (ints(0, 5, 3, 8), "never fall"),
        (ints(0), r"must have shape \[N\+1\] with N >= 1, got \(1,\)"),
        (ints(0, 8)[None], r"must have shape \[N\+1\]"),
        (torch.tensor([0.0, 8.0]), "must be int32 or int64, got torch.float32"),
    ],
    ids=str,
)
def test_offsets_that_do_not_fit_are_refused(offsets, message):
    tensors = inputs("linear", (1, 8, 3, 4, 5), states=max(1, offsets.numel() - 1))
    with pytest.raises(ValueError, match=message):
        call("linear", tensors, cu_seqlens=offsets)


def test_packed_sequences_lie_in_one_row():
    with pytest.raises(ValueError, match="B must be 1, got 2"):
        call("delta", inputs("delta", SHAPE), cu_seqlens=ints(0, 8))


def test_a_pair_is_the_state_of_a_normaliser_and_of_nothing_else():
    t = inputs("linear_normalized", SHAPE)
    q, k, v, kv, z = (t[n] for n in ("q", "k", "v", "state", "z"))
    with pytest.raises(ValueError, match=r"a pair \(kv, z\) with normalize=True, got Tensor"):
        linear_attention(q, k, v, normalize=True, initial_state=kv)
    with pytest.raises(ValueError, match=r"one tensor .* with normalize=False, got tuple"):
        linear_attention(q, k, v, initial_state=(kv, z))


def test_decay_needs_a_past():
    t = inputs("linear_decay", SHAPE)
    with pytest.raises(ValueError, match="needs causal=True"):
        linear_attention(t["q"], t["k"], t["v"], decay=t["decay"], causal=False)


def test_an_implementation_is_known_and_never_falls_back():
    t = inputs("delta", SHAPE)
    with pytest.raises(ValueError, match=f"one of {', '.join(IMPLEMENTATIONS)}, got 'fast'"):
        call("delta", t, impl="fast")
    with pytest.raises(BackendUnavailableError, match="has no float64"):
        call("delta", t, impl="triton")
    assert choose("auto", torch.device("cpu"))[0] == "chunked"
    assert choose("reference", torch.device("cpu")) == ("reference", "asked for")


def test_with_checks_on_nothing_that_is_not_finite_passes(monkeypatch):
    tensors = inputs("linear", SHAPE)
    tensors["v"][0, 3, 1, 2] = torch.nan
    call("linear", tensors)
    monkeypatch.setenv("RANKONE_CHECK", "1")
    with pytest.raises(ValueError, match="v must be finite"):
        call("linear", tensors)
