"""Building by name, and what is refused."""

from __future__ import annotations

import pytest
import torch

from rankone.layers import MECHANISMS, build

X = torch.zeros(2, 5, 8)


def test_an_unknown_name_lists_those_that_are_there():
    with pytest.raises(
        ValueError, match=r"mechanism must be one of softmax, linear, .* got 'mamba'"
    ):
        build("mamba", dim=8, heads=2)


def test_an_unknown_option_is_named():
    with pytest.raises(ValueError, match=r"linear does not take these options: .*'window'"):
        build("linear", dim=8, heads=2, window=3)


@pytest.mark.parametrize("name", [n for n, m in MECHANISMS.items() if not m.facts.causal])
def test_what_cannot_be_causal_names_those_that_can(name):
    able = ", ".join(n for n, m in MECHANISMS.items() if m.facts.causal)
    with pytest.raises(ValueError, match=f"{name} cannot be causal, .*; these can: {able}"):
        build(name, dim=8, heads=2, causal=True)


@pytest.mark.parametrize("name", [n for n, m in MECHANISMS.items() if not m.facts.streams])
def test_what_cannot_stream_names_those_that_can(name):
    able = ", ".join(n for n, m in MECHANISMS.items() if m.facts.streams)
    with pytest.raises(ValueError, match=f"{name} has no state .*; these can: {able}"):
        build(name, dim=8, heads=2)(X, return_state=True)


@pytest.mark.parametrize("name", [n for n, m in MECHANISMS.items() if m.facts.streams])
def test_a_state_needs_a_causal_layer(name):
    with pytest.raises(ValueError, match="a state needs a causal layer: build"):
        build(name, dim=8, heads=2)(X, return_state=True)


@pytest.mark.parametrize("name", [n for n, m in MECHANISMS.items() if not m.facts.cross])
def test_what_has_no_cross_attention_names_those_that_have(name):
    with pytest.raises(ValueError, match="these can: softmax, linear, performer, rfa"):
        build(name, dim=8, heads=2)(X, context=X)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("linear", {"dim": 0}, "dim and heads must be at least 1, got 0 and 2"),
        ("linear", {"heads": 3}, "heads must divide dim = 8"),
        ("performer", {"features": 0}, "features must be at least 1, got 0"),
        ("performer", {"kernel": "exp"}, "kernel must be one of softmax, relu, got 'exp'"),
        ("rfa", {"gate": True}, "needs causal=True"),
        ("rfa", {"temperature": 0.0}, "temperature positive"),
        ("linformer", {"share": "all"}, "share must be one of none, headwise, key-value"),
        ("linformer", {"rank": 0}, "rank and max_length must be at least 1"),
        ("nystromformer", {"convolution": 4}, "convolution must be odd or None, got 4"),
        ("longformer", {"dilation": (1, 2, 3)}, "one for each of 2 heads"),
        ("longformer", {"window": -1}, "window and global_tokens must be at least 0"),
        ("longformer", {"causal": True, "global_tokens": 1}, "global tokens see the future"),
        ("bigbird", {"block": 0}, "block must be at least 1"),
        ("long_short", {"rank": 0}, "rank and chunk must be at least 1"),
    ],
)
def test_options_that_cannot_be(name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, **{"dim": 8, "heads": 2} | options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"x": X[0]}, r"x must have shape \[B, T, D\] .* got \(5, 8\)"),
        ({"x": X[..., :7]}, r"D = 8, got \(2, 5, 7\)"),
        ({"mask": torch.ones(2, 4, dtype=torch.bool)}, r"mask must have shape .* \(2, 5\)"),
        ({"mask": torch.ones(2, 5)}, "mask must be bool, True for real tokens, got torch.float32"),
        ({"context": X[:1]}, "context must have the batch of x, 2, got 1"),
        ({"context_mask": torch.ones(2, 5, dtype=torch.bool)}, "context_mask needs a context"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_calls_that_cannot_be(call, message):
    call = {"x": X} | call
    with pytest.raises(ValueError, match=message):
        build("linear", dim=8, heads=2)(call.pop("x"), **call)


def test_a_context_is_for_layers_that_are_not_causal():
    with pytest.raises(ValueError, match="context needs a layer that is not causal"):
        build("linear", dim=8, heads=2, causal=True)(X, context=X)


def test_a_sequence_longer_than_linformer_was_made_for():
    layer = build("linformer", dim=8, heads=2, max_length=4)
    with pytest.raises(ValueError, match="up to max_length = 4 tokens, got 5"):
        layer(X)


def test_long_short_with_a_state_wants_no_mask():
    layer = build("long_short", dim=8, heads=2, causal=True)
    with pytest.raises(ValueError, match="without padding, so no mask"):
        layer(X, mask=torch.ones(2, 5, dtype=torch.bool), return_state=True)


def test_performer_draws_its_projection_from_a_seed_and_again_if_asked():
    one, same, other = (build("performer", dim=8, heads=2, seed=s) for s in (1, 1, 2))
    assert torch.equal(one.projection, same.projection)
    assert not torch.equal(one.projection, other.projection)
    same.redraw(torch.Generator().manual_seed(2))
    assert torch.equal(same.projection, other.projection)
    assert "projection" in one.state_dict()
