"""The fused kernels on an NVIDIA GPU: every layout that can be chosen, and large sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ops.cases import assert_close, call, inputs, with_gradients
from rankone.ops import delta_rule, linear_attention

pytestmark = pytest.mark.gpu

OPS = ("linear", "linear_decay", "delta", "delta_decay")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
HEADS = [(16, 16), (30, 17), (32, 64), (64, 64), (64, 128), (128, 128), (100, 256), (256, 64)]


def on_gpu(op: str, shape: tuple[int, ...], **options) -> dict[str, Tensor]:
    """Inputs as trained models have them: decays that are mostly mild."""
    tensors = {n: x.to("cuda") for n, x in inputs(op, shape, **options).items()}
    if "decay" in tensors:
        tensors["decay"] = tensors["decay"] * 0.2
    return tensors


def exact(op: str, tensors: dict[str, Tensor], **options) -> dict[str, Tensor]:
    double = {n: x.double() for n, x in tensors.items()}
    return with_gradients(op, double, impl="chunked", **options)


# Few and many sequences, in one piece or several: the layout depends on how full the device is.
@pytest.mark.parametrize(
    ("batch", "length"), [(1, 2200), (1, 4500), (20, 150), (32, 150), (100, 150)]
)
@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_every_layout_that_can_be_chosen_is_the_definition(op, dtype, head, batch, length):
    tensors = on_gpu(op, (batch, length, 2, *head), dtype=dtype)
    got = with_gradients(op, tensors, impl="triton")
    assert_close(got, exact(op, tensors), TOLERANCES[dtype], gradients=1.6)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_packed_sequences_of_all_lengths(op, dtype):
    ends = [0, 1, 1, 64, 130, 1154, 1155, 3000, 40_000]  # long enough to be cut
    offsets = torch.tensor(ends, device="cuda")
    tensors = on_gpu(op, (1, ends[-1], 2, 64, 64), states=len(ends) - 1, dtype=dtype)
    got = with_gradients(op, tensors, impl="triton", cu_seqlens=offsets)
    want = exact(op, tensors, cu_seqlens=offsets)
    assert_close(got, want, TOLERANCES[dtype], gradients=1.6)
    a, b = next((a, b) for a, b in pairwise(ends) if b - a > 1000)
    alone = {n: x[5:6] if n == "state" else x[:, a:b] for n, x in tensors.items()}
    assert ends.index(a) == 4
    alone["state"] = tensors["state"][4:5]
    part = call(op, alone, impl="triton")["o"]
    assert_close({"o": got["o"][:, a:b]}, {"o": part}, TOLERANCES[dtype])


@pytest.mark.parametrize("op", OPS)
def test_more_tokens_than_65536(op):
    tensors = on_gpu(op, (1, 70_001, 2, 64, 64), dtype=torch.bfloat16)
    got = with_gradients(op, tensors, impl="triton")
    assert_close(got, exact(op, tensors), 5e-3, gradients=1.6)


@pytest.mark.parametrize("op", OPS)
def test_more_sequences_and_heads_than_65535(op):
    tensors = on_gpu(op, (23_000, 3, 3, 16, 16), dtype=torch.bfloat16)
    got = with_gradients(op, tensors, impl="triton")
    assert_close(got, exact(op, tensors), 5e-3, gradients=1.6)


@pytest.mark.parametrize("op", ["linear_decay", "delta_decay"])
def test_more_than_two_billion_elements(op):
    B, T, H, K = 3, 350_000, 16, 128
    assert B * T * H * K > 2**31
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device="cuda", dtype=torch.bfloat16)

    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, K)
    k *= K**-0.5
    beta = torch.rand(B, T, H, generator=g, device="cuda")
    decay = -0.1 * torch.rand(B, T, H, generator=g, device="cuda")

    def run(rows: slice) -> list[Tensor]:
        leaves = [x[rows].detach().requires_grad_() for x in (q, k, v, decay, beta)]
        options = {"decay": leaves[3], "impl": "triton"}
        if op == "delta_decay":
            o = delta_rule(*leaves[:3], leaves[4], **options).output
        else:
            leaves.pop()
            o = linear_attention(*leaves[:3], **options).output
        return [o.detach(), *torch.autograd.grad(o, leaves, v[rows])]

    together = [x[-1, -5000:].clone() for x in run(slice(None))]
    alone = [x[-1, -5000:] for x in run(slice(B - 1, B))]
    for ours, truth in zip(together, alone, strict=True):
        error = float((ours.double() - truth.double()).norm() / truth.double().norm())
        assert error < 8e-3


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_nothing_waits_for_the_gpu_and_a_new_length_compiles_nothing(op, packed):
    import triton

    def step(length: int) -> None:
        cu = torch.tensor([0, 7, length], device="cuda") if packed else None
        states = 2 if packed else None
        tensors = on_gpu(op, (1, length, 2, 64, 64), states=states, dtype=torch.bfloat16)
        leaves = {n: x.requires_grad_() for n, x in tensors.items()}
        if packed:  # new offsets are looked at, once
            call(op, tensors, impl="triton", cu_seqlens=cu)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = call(op, leaves, impl="triton", cu_seqlens=cu)
            torch.autograd.grad(
                [found["o"], found["state"]],
                list(leaves.values()),
                [torch.ones_like(found["o"]), torch.ones_like(found["state"])],
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for length in (700, 9000):  # one piece and several, of two packed sequences too
        step(length)
    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda *_, **__: compiled.append(1)
    try:
        for length in (701, 733, 8300, 9001):
            step(length)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert not compiled


@pytest.mark.usefixtures("unchecked")
def test_offsets_on_the_gpu_are_looked_at_once_and_again_if_they_change(monkeypatch):
    looked = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: looked.append(1) or tolist(x))
    tensors = on_gpu("linear", (1, 20, 1, 4, 3), states=2, dtype=torch.float32)
    cu = torch.tensor([0, 7, 20], device="cuda")
    for _ in range(3):
        call("linear", tensors, impl="triton", cu_seqlens=cu)
    assert len(looked) == 1
    cu[1] = 30
    with pytest.raises(ValueError, match=r"never fall, got \[0, 30, 20\]"):
        call("linear", tensors, impl="triton", cu_seqlens=cu)
    assert len(looked) == 2


@pytest.mark.parametrize("op", OPS)
def test_runs_repeat_to_the_bit_at_full_size(op):
    tensors = on_gpu(op, (2, 4000, 8, 128, 128), dtype=torch.bfloat16)
    first = with_gradients(op, tensors, impl="triton")
    for _ in range(3):
        again = with_gradients(op, tensors, impl="triton")
        for name, x in first.items():
            assert torch.equal(again[name], x), name
