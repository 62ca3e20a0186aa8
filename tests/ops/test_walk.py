"""The walk in compiled code for the CPU; that it is the definition is in test_recurrences."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ops.cases import OPS, assert_close, call, inputs, with_gradients
from rankone.ops.dispatch import walks
from rankone.ops.walk import emitter, machine, operation, steps, tracks
from rankone.ops.walk.emitter import lanes_of

PLAIN = [op for op in OPS if op != "linear_normalized"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (16, 16), (17, 40), (64, 64)], ids=str)
@pytest.mark.parametrize("op", PLAIN)
def test_sizes_that_fill_vectors_and_those_that_do_not(op, sizes, dtype):
    tensors = inputs(op, (1, 600, 2, *sizes), dtype=dtype)
    exact = {n: x.double() for n, x in tensors.items()}
    want = with_gradients(op, exact, impl="reference")
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5
    assert_close(with_gradients(op, tensors, impl="chunked"), want, tolerance)


@pytest.mark.parametrize("op", PLAIN)
def test_threads_change_no_bit(op, monkeypatch):
    tensors = inputs(op, (3, 70, 2, 8, 6), dtype=torch.float32)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(with_gradients(op, tensors, impl="chunked"))
    for other in found[1:]:
        for name, x in found[0].items():
            assert torch.equal(other[name], x), name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", PLAIN)
def test_the_operation_keeps_the_rules_of_torch_library(op, packed):
    t = inputs(op, (1, 20, 2, 4, 3), states=2 if packed else None, dtype=torch.float32)
    cu = torch.tensor([0, 7, 20]) if packed else None
    tensors = [t["q"], t["k"], t["v"], t.get("beta"), t.get("decay"), t["state"], cu, 0.5]
    for x in tensors:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_()
    torch.library.opcheck(operation._forward, (*tensors, True, True))


@pytest.mark.parametrize("op", PLAIN)
def test_inputs_need_not_be_contiguous_and_stay_as_they_are(op):
    tensors = inputs(op, (2, 30, 2, 8, 6), dtype=torch.float32)
    strided = {
        n: x if n == "state" else x.transpose(1, 2).contiguous().transpose(1, 2)
        for n, x in tensors.items()
    }
    before = {n: x.clone() for n, x in strided.items()}
    got = call(op, strided, impl="chunked")
    assert_close(got, call(op, tensors, impl="chunked"), 1e-12)
    for name, x in strided.items():
        assert torch.equal(x, before[name]), name


def test_only_the_cpu_is_walked_on():
    assert walks(torch.device("cpu"))
    assert not walks(torch.device("cuda"))
    assert not walks(torch.device("mps"))


def test_a_vector_has_as_many_lanes_as_fit():
    assert lanes_of(32) == 2 * lanes_of(64)
    assert lanes_of(32) in (8, 16)


@pytest.mark.parametrize("op", PLAIN)
@pytest.mark.parametrize("lanes", [(256, 16), (512, 32)], ids=str)
def test_other_vectors_find_the_same(op, lanes, monkeypatch):
    tensors = inputs(op, (2, 150, 2, 24, 40), dtype=torch.float32)
    want = with_gradients(op, {n: x.double() for n, x in tensors.items()}, impl="reference")
    for module in (emitter, steps):
        monkeypatch.setattr(module, "registers", lambda: lanes)
    tracks.kernel.cache_clear()
    try:
        assert_close(with_gradients(op, tensors, impl="chunked"), want, 1e-5)
    finally:
        tracks.kernel.cache_clear()


@pytest.mark.parametrize("op", PLAIN)
def test_python_threads_do_where_there_is_no_openmp(op, monkeypatch):
    tensors = inputs(op, (3, 70, 2, 8, 6), dtype=torch.float32)
    want = with_gradients(op, tensors, impl="chunked")
    monkeypatch.setattr(machine, "_openmp", lambda: None)
    got = with_gradients(op, tensors, impl="chunked")
    for name, x in want.items():
        assert torch.equal(got[name], x), name


@pytest.mark.parametrize("op", PLAIN)
def test_memory_that_was_not_written_is_not_read(op, monkeypatch):
    """Rooms are NaN at first, and so is what lies beside strided tensors."""
    tensors = inputs(op, (2, 133, 2, 8, 6), dtype=torch.float32)
    want = with_gradients(op, tensors, impl="chunked")
    beside = {
        n: x if n == "state" else torch.cat([x, torch.full_like(x, torch.nan)], dim=2)[:, :, :2]
        for n, x in tensors.items()
    }
    new = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *a, **k: new(self, *a, **k).fill_(torch.nan)
    )
    got = with_gradients(op, beside, impl="chunked")
    for name, x in want.items():
        assert torch.equal(got[name], x), name


def test_nothing_is_kept_for_a_backward_that_cannot_come():
    t = inputs("linear", (1, 300, 1, 4, 3), dtype=torch.float32)
    given = operation.Call(t["q"], t["k"], t["v"], None, None, 1.0)
    kept = operation.walk(given, None, None, last=False, keep=True)
    bare = operation.walk(given, None, None, last=False, keep=False)
    assert torch.equal(kept[0], bare[0])
    assert kept[2].shape[0] == 2
    assert bare[1].numel() == bare[2].numel() == 0


def test_a_first_call_imports_no_tracer():
    """PyTorch's tracer takes a second to import."""
    code = """
import sys, torch
from rankone import ops
x = torch.ones(1, 2, 1, 3, requires_grad=True)
ops.linear_attention(x, x, x).output.sum().backward()
print("torch._dynamo" in sys.modules, "numba" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False False", done.stderr[-2000:]
