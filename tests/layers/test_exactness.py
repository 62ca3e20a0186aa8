"""Mechanisms are softmax attention where they say so, or get there at the rate of sampling."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from properties import close
from rankone.layers import MECHANISMS, Layer, build

DIM, HEADS, T = 16, 2, 40


def sample(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(name: str, *, causal: bool = False, **options) -> tuple[Layer, Layer]:
    """A layer, and softmax attention with its weights."""
    torch.manual_seed(0)
    layer = build(name, dim=DIM, heads=HEADS, causal=causal, **options).double()
    exact = build("softmax", dim=DIM, heads=HEADS, causal=causal).double()
    exact.load_state_dict(layer.state_dict(), strict=False)
    return layer, exact


@pytest.mark.parametrize(
    ("name", "causal", "options"),
    [
        ("longformer", False, {"window": T}),
        ("longformer", False, {"window": T, "global_tokens": 3}),
        ("longformer", True, {"window": T}),
        ("bigbird", False, {"block": 10, "random": 0}),
        ("bigbird", False, {"block": 4, "random": 6}),
        ("nystromformer", False, {"landmarks": T, "convolution": None}),
    ],
    ids=str,
)
def test_with_everything_in_view_it_is_softmax_attention(name, causal, options):
    layer, exact = pair(name, causal=causal, **options)
    x = sample(2, T, DIM)
    close(layer(x), exact(x), 1e-5)
    mask = torch.arange(T) < torch.tensor([[T], [23]])
    close(layer(x, mask=mask), exact(x, mask=mask), 1e-5)


def test_linformer_with_the_identity_is_softmax_attention():
    layer, exact = pair("linformer", rank=T, max_length=T, share="headwise")
    with torch.no_grad():
        layer.projections.keys.copy_(torch.eye(T))
        layer.projections.own_values.copy_(torch.eye(T))
    x = sample(2, T, DIM)
    close(layer(x), exact(x), 1e-5)


def test_long_short_with_a_wide_window_is_softmax_attention_without_its_norms():
    layer, exact = pair("long_short", window=T, rank=1)
    layer.near_norm = torch.nn.Identity()
    # Nothing that is projected is seen.
    layer._far = lambda x, k, v, mask: (k[:, 0, :0], v[:, 0, :0])
    x = sample(2, T, DIM)
    close(layer(x), exact(x), 1e-5)


def slope(name: str, counts: tuple[int, ...], causal: bool) -> float:
    """How the error falls with the number of features, both logarithmic, over some draws."""
    layer, exact = pair(name, causal=causal, features=1)
    if name == "rfa":  # what it approximates is attention of unit vectors
        exact._heads = lambda x, own=exact._heads: own(x)
        project = exact.project

        def units(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = project(x)
            q, k = (torch.nn.functional.normalize(y, dim=-1) for y in (q, k))
            return q * exact.head_dim**0.5, k, v  # undoes the scale of the softmax

        exact.project = units
        exact.cross = lambda x, context, mask: _attend(*units(x))
    x = 0.5 * sample(2, T, DIM)  # larger ones get to that rate later
    want = exact(x)
    errors = []
    for count in counts:
        drawn = []
        for seed in range(12):
            layer, _ = pair(name, causal=causal, features=count, seed=seed)
            drawn.append(float((layer(x) - want).detach().norm() / want.detach().norm()))
        errors.append(math.sqrt(sum(e**2 for e in drawn) / len(drawn)))
    logs = [(math.log(c), math.log(e)) for c, e in zip(counts, errors, strict=True)]
    mean_x, mean_y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    above = sum((a - mean_x) * (b - mean_y) for a, b in logs)
    return above / sum((a - mean_x) ** 2 for a, _ in logs)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("bhts,bshv->bthv", weights, v)


@pytest.mark.parametrize("name", ["performer", "rfa"])
@pytest.mark.parametrize("causal", [False, True])
def test_random_features_converge_as_one_over_the_root_of_their_number(name, causal):
    if name == "rfa" and causal:
        pytest.skip("the same sums")
    assert slope(name, (64, 256, 1024, 4096), causal) == pytest.approx(-0.5, abs=0.1)


def test_the_linear_transformer_is_its_formula():
    layer, _ = pair("linear")
    x = sample(2, T, DIM)
    q, k, v = layer.project(x)
    q, k = (torch.nn.functional.elu(y) + 1 for y in (q, k))
    weights = torch.einsum("bthk,bshk->bhts", q, k)
    weights = weights / weights.sum(-1, keepdim=True)
    want = layer.out(torch.einsum("bhts,bshv->bthv", weights, v).flatten(-2))
    close(layer(x), want, 1e-6)


def test_the_gate_of_rfa_is_its_recurrence():
    layer, _ = pair("rfa", causal=True, gate=True, features=12)
    x = sample(1, 9, DIM)
    q, k, v = layer.project(x)
    q, k = layer.features(q, query=True), layer.features(k, query=False)
    g = torch.sigmoid(layer.gate(x))
    S, z, found = 0.0, 0.0, []
    for t in range(9):
        keep, write = g[:, t, :, None], 1 - g[:, t, :, None]
        S = keep[..., None] * S + torch.einsum("bhf,bhv->bhfv", write * k[:, t], v[:, t])
        z = keep * z + write * k[:, t]
        above = torch.einsum("bhf,bhfv->bhv", q[:, t], S)
        found.append(above / (q[:, t] * z).sum(-1, keepdim=True))
    want = layer.out(torch.stack(found, dim=1).flatten(-2))
    close(layer(x), want, 1e-6)


def test_longformers_causal_window_looks_back_only_and_no_further():
    layer, _ = pair("longformer", causal=True, window=3)
    x = sample(1, T, DIM).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x)[0, 20].sum(), x)
    touched = grad[0].abs().sum(-1).nonzero().flatten().tolist()
    assert touched == [17, 18, 19, 20]


def test_long_short_sees_chunks_that_ended_before_its_own_began():
    layer, _ = pair("long_short", causal=True, window=2, chunk=5)
    x = sample(1, T, DIM).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x)[0, 18].sum(), x)
    touched = grad[0].abs().sum(-1).nonzero().flatten().tolist()
    assert touched == [*range(15), 16, 17, 18]  # its own chunk began at 15


@pytest.mark.parametrize("sharing", ["none", "headwise", "key-value"])
def test_linformer_shares_as_asked(sharing):
    layer, _ = pair("linformer", rank=5, max_length=T, share=sharing)
    p = layer.projections
    assert p.keys.shape[0] == (HEADS if sharing == "none" else 1)
    assert (p.own_values is None) == (sharing == "key-value")


def test_linformers_can_share_one_projection():
    from rankone.layers import Projections

    shared = Projections(5, T)
    both = [build("linformer", dim=DIM, heads=HEADS, projections=shared) for _ in range(2)]
    assert both[0].projections is both[1].projections is shared


@pytest.mark.parametrize("name", [n for n, m in MECHANISMS.items() if m.facts.cross])
def test_keys_and_values_can_come_from_another_sequence(name):
    layer, _ = pair(name)
    x, other = sample(2, 7, DIM), sample(2, 12, DIM, seed=1)
    close(layer(x, context=x), layer(x), 1e-9)
    mask = torch.arange(12) < torch.tensor([[12], [4]])
    got = layer(x, context=other, context_mask=mask)
    close(got[1:], layer(x[1:], context=other[1:, :4]), 1e-9)
    assert got.shape == x.shape
