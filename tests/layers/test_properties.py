"""Every mechanism satisfies the properties."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import properties
from properties import CASES, DIM, HEADS, STREAMS, close, sample
from rankone.layers import MECHANISMS, build


@pytest.mark.parametrize("where", ["after", "before", "around", "between"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_padding_changes_nothing(case, where):
    properties.padding_changes_nothing(case, where)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_padding_changes_nothing_for_a_few_tokens(case):
    properties.padding_changes_nothing(case, "after", length=2, more=40)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_neighbours_change_nothing(case):
    properties.neighbours_change_nothing(case)


@pytest.mark.parametrize("case", STREAMS, ids=str)
def test_the_future_changes_nothing(case):
    properties.the_future_changes_nothing(case)


@pytest.mark.parametrize("cuts", [(1,), (20,), (3, 4, 5, 30), tuple(range(1, 43))], ids=str)
@pytest.mark.parametrize("case", STREAMS, ids=str)
def test_a_split_is_the_whole(case, cuts):
    properties.a_split_is_the_whole(case, cuts)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_finite_differences(case):
    properties.gradients_are_finite_differences(case)


@pytest.mark.parametrize("length", [1, 2, 3, 64, 65, 127])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_length_will_do(case, length):
    layer, x = case.layer(), sample(2, length).requires_grad_()
    y = layer(x)
    assert y.shape == x.shape
    assert bool(torch.isfinite(y).all())
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert bool(torch.isfinite(grad).all())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_sequence_without_a_token_gets_zeros_and_no_nan(case):
    layer, x = case.layer(), sample(2, 20).requires_grad_()
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1] = False
    y = layer(x, mask=mask)
    assert not y[1].any()
    close(y[:1], layer(x[:1]))
    grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()], allow_unused=True)
    assert all(g is None or bool(torch.isfinite(g).all()) for g in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dtypes_are_kept_and_near_float64(case, dtype):
    x = sample(2, 30)
    want, got = case.layer()(x).detach(), case.layer(dtype)(x.to(dtype)).detach()
    assert got.dtype == dtype
    error = float((got.double() - want).norm() / want.norm())
    assert error < {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_autocast_runs(case):
    layer, x = case.layer(torch.float32), sample(2, 20, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x).detach().double()
    want = layer(x).detach().double()
    assert float((y - want).norm() / want.norm()) < 4e-2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_saved_and_loaded_is_the_same_layer(case, tmp_path):
    layer, x = case.layer(), sample(1, 25)
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = build(case.name, dim=DIM, heads=HEADS, causal=case.causal, **case.options).double()
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_and_evaluation_compute_the_same(case):
    layer, x = case.layer(), sample(1, 50)
    assert torch.equal(layer.train()(x), layer.eval()(x))


COMPILED = """
import sys, torch
sys.path.insert(0, {folder!r})
from properties import CASES, sample
for case in CASES:
    layer, x = case.layer(), sample(2, 21).requires_grad_()
    mask = torch.arange(21) < torch.tensor([[21], [13]])
    for given in (None, mask):
        torch._dynamo.reset()
        fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
        plain, compiled = layer(x, mask=given), fast(x, mask=given)
        torch.testing.assert_close(compiled, plain)
        for a, b in zip(*(torch.autograd.grad(y.square().sum(), x) for y in (plain, compiled))):
            torch.testing.assert_close(a, b)
    if case.causal:
        torch._dynamo.reset()
        fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
        _, state = fast(x[:, :9], return_state=True)
        y = fast(x[:, 9:], state=state)
        torch.testing.assert_close(y, layer(x)[:, 9:])
print("compiled")
"""


def test_every_layer_compiles_as_one_graph():
    """In a process of its own: the checks of annotations cannot be compiled."""
    code = COMPILED.format(folder=str(Path(__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "compiled", done.stderr[-3000:]


def test_every_mechanism_has_a_case():
    assert {case.name for case in CASES} == set(MECHANISMS)
    for name, mechanism in MECHANISMS.items():
        assert any(c.causal for c in CASES if c.name == name) == mechanism.facts.causal
