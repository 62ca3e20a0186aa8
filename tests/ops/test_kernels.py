"""The fused kernels: the definition again. Without a GPU they run in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton  # noqa: F401 - this module is left out where it is missing
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.cases import OPS, assert_close, call, inputs, with_gradients
from rankone.errors import BackendUnavailableError
from rankone.ops import choose, delta_rule, linear_attention
from rankone.ops.delta_rule import triton as delta
from rankone.ops.linear_attention import triton as linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}


def on_device(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.to(DEVICE) for name, x in tensors.items()}


def exact(op: str, tensors: dict[str, torch.Tensor], **options) -> dict[str, torch.Tensor]:
    return with_gradients(
        op, {n: x.double() for n, x in tensors.items()}, impl="chunked", **options
    )


SHAPES = [
    (1, 1, 1, 2, 1),
    (2, 33, 3, 5, 4),
    (1, 65, 2, 16, 20),
]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_outputs_states_and_gradients_are_those_of_the_definition(op, shape, dtype):
    tensors = on_device(inputs(op, shape, dtype=dtype))
    got = with_gradients(op, tensors, impl="triton")
    assert got["o"].dtype == got["dq"].dtype == dtype
    assert got["state"].dtype == torch.float32
    assert_close(got, exact(op, tensors), TOLERANCES[dtype], gradients=1.6)


@pytest.mark.parametrize("op", OPS)
@given(
    shape=st.tuples(
        st.integers(1, 2), st.integers(1, 80), st.integers(1, 2), st.integers(1, 20),
        st.integers(1, 20),
    ),
    seed=st.integers(0, 100),
)  # fmt: skip
@settings(max_examples=4)
def test_any_shape_will_do(op, shape, seed):
    tensors = on_device(inputs(op, shape, seed=seed, dtype=torch.float32))
    truth = call(op, {n: x.double() for n, x in tensors.items()}, impl="reference")
    assert_close(call(op, tensors, impl="triton"), truth, 1e-5)


# Decay of all tokens; a few tokens that forget, in one chunk; at the edge of what may grow.
DECAYS = {
    "mild": lambda d: -0.02 * d,
    "strong": lambda d: -3.0 * d,
    "mixed": lambda d: torch.where(torch.arange(d.shape[1])[:, None] == 90, -70.0, -0.02 * d),
    "edge": lambda d: torch.full_like(d, -55.0 / 64),
    "none": torch.zeros_like,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("op", ["linear_decay", "delta_decay"])
def test_decays_mild_and_strong_are_the_definition(op, decays, dtype):
    tensors = inputs(op, (1, 150, 2, 40, 36), dtype=dtype)
    d = torch.rand(1, 150, 2, generator=torch.Generator().manual_seed(3))
    tensors = on_device(tensors | {"decay": DECAYS[decays](d)})
    got = with_gradients(op, tensors, impl="triton")
    assert_close(got, exact(op, tensors), TOLERANCES[dtype], gradients=1.6)


@pytest.mark.parametrize("keys", [40, 64, 150])
@pytest.mark.parametrize("op", OPS)
def test_larger_heads_than_a_tile_of_sixteen(op, keys):
    tensors = on_device(inputs(op, (1, 70, 1, keys, keys + 20), dtype=torch.bfloat16))
    got = with_gradients(op, tensors, impl="triton")
    assert_close(got, exact(op, tensors), 5e-3, gradients=1.6)


@pytest.mark.parametrize("op", OPS)
def test_packed_sequences_are_computed_apart(op):
    offsets = torch.tensor([0, 0, 3, 3, 40, 41, 75], device=DEVICE)
    tensors = on_device(inputs(op, (1, 75, 2, 6, 5), states=6, dtype=torch.float32))
    got = with_gradients(op, tensors, impl="triton", cu_seqlens=offsets)
    assert_close(got, exact(op, tensors, cu_seqlens=offsets), 1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", ["linear", "linear_decay", "delta", "delta_decay"])
def test_long_sequences_are_cut_where_there_are_few(op, packed, monkeypatch):
    offsets = torch.tensor([0, 3, 3, 1100, 1200], device=DEVICE) if packed else None
    shape = (1, 1200, 1, 5, 4) if packed else (2, 1100, 1, 5, 4)
    tensors = on_device(inputs(op, shape, states=4 if packed else None, dtype=torch.float32))
    for way in (linear, delta):

        def cut(*args, planned=way.plan):
            return planned(*args)._replace(length=1024)

        monkeypatch.setattr(way, "plan", cut)
    got = with_gradients(op, tensors, impl="triton", cu_seqlens=offsets)
    assert_close(got, exact(op, tensors, cu_seqlens=offsets), 1e-5)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("offsets", [None, [0, 3, 3, 50]], ids=str)
def test_without_causality_every_token_sees_all_of_its_sequence(offsets, normalize):
    op = "linear_normalized" if normalize else "linear"
    states = None if offsets is None else 3
    cu = None if offsets is None else torch.tensor(offsets, device=DEVICE)
    tensors = on_device(inputs(op, (1, 50, 2, 6, 5), states=states, dtype=torch.float32))
    got = with_gradients(op, tensors, impl="triton", cu_seqlens=cu, causal=False, decay=None)
    want = exact(op, tensors, cu_seqlens=cu, causal=False, decay=None)
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize("op", OPS)
def test_split_with_state_equals_whole(op):
    tensors = on_device(inputs(op, (2, 50, 1, 8, 6), dtype=torch.float32))
    whole = call(op, tensors, impl="triton")
    first = {n: x if n in ("state", "z") else x[:, :20] for n, x in tensors.items()}
    start = call(op, first, impl="triton")
    rest = {n: start[n] if n in ("state", "z") else x[:, 20:] for n, x in tensors.items()}
    end = call(op, rest, impl="triton")
    assert_close(end | {"o": torch.cat([start["o"], end["o"]], dim=1)}, whole, 1e-5)


@pytest.mark.parametrize("op", OPS)
def test_the_future_never_changes_the_past_and_runs_repeat_bit_for_bit(op):
    tensors = on_device(inputs(op, (2, 70, 1, 8, 6), dtype=torch.float32))
    other = on_device(inputs(op, (2, 70, 1, 8, 6), dtype=torch.float32, seed=1))
    changed = {
        n: x if n in ("state", "z") else torch.cat([x[:, :37], other[n][:, 37:]], dim=1)
        for n, x in tensors.items()
    }
    before, after = (call(op, t, impl="triton")["o"] for t in (tensors, changed))
    assert torch.equal(before[:, :37], after[:, :37])
    assert not torch.equal(before, after)
    assert torch.equal(before, call(op, tensors, impl="triton")["o"])


@pytest.mark.parametrize("op", OPS)
def test_nothing_is_read_that_was_not_written(op, monkeypatch):
    tensors = on_device(inputs(op, (1, 45, 2, 6, 5), dtype=torch.float32))
    clean = with_gradients(op, tensors, impl="triton")

    def poison(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        return made

    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]:
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
    poisoned = with_gradients(op, tensors, impl="triton")
    for name, x in clean.items():
        assert torch.equal(poisoned[name], x), name


@pytest.mark.parametrize("op", ["linear", "delta"])
def test_a_scale_of_zero_gives_zeros_and_no_nan(op):
    tensors = on_device(inputs(op, (1, 20, 1, 4, 3), dtype=torch.float32))
    got = with_gradients(op, tensors, impl="triton", scale=0.0)
    assert_close(got, exact(op, tensors, scale=0.0), 1e-5)


def test_nothing_is_kept_for_a_backward_that_cannot_come():
    t = on_device(inputs("delta", (1, 20, 1, 4, 3), dtype=torch.float32))
    q, k, v, beta = (t[n] for n in ("q", "k", "v", "beta"))
    _, *kept = delta.run(q, k, v, beta, None, None, None, 1.0, False, False)
    assert [x.numel() for x in kept] == [0, 0, 0, 0]
    assert delta_rule(q, k, v, beta, impl="triton").final_state is None


def test_what_the_kernels_cannot_do_is_said_and_auto_does_it_otherwise():
    t = on_device(inputs("linear", (1, 5, 1, 4, 3)))
    with pytest.raises(BackendUnavailableError, match="has no float64"):
        linear_attention(t["q"], t["k"], t["v"], impl="triton")
    linear_attention(t["q"], t["k"], t["v"])
    wide = torch.zeros(1, 2, 1, 300, device=DEVICE)
    with pytest.raises(BackendUnavailableError, match="K <= 256, got 300"):
        delta_rule(wide, wide, wide, wide[..., 0], impl="triton")
    assert choose("auto", torch.device(DEVICE), keys=300)[0] == "chunked"
    assert choose("auto", torch.device("cpu"))[0] == "chunked"


def test_without_interpreter_and_gpu_it_says_what_is_missing(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendUnavailableError, match="needs an NVIDIA GPU"):
        choose("triton", torch.device("cpu"))
    monkeypatch.setattr("rankone.ops.dispatch._has_triton", lambda: False)
    with pytest.raises(BackendUnavailableError, match="pip install"):
        choose("triton", torch.device("cpu"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", ["linear", "linear_decay", "delta_decay"])
def test_the_operations_keep_the_rules_of_torch_library(op, packed):
    t = inputs(op, (1, 20, 1, 4, 3), states=2 if packed else None, dtype=torch.float32)
    t = on_device(t)
    cu = torch.tensor([0, 7, 20], device=DEVICE) if packed else None
    tensors = [t["q"], t["k"], t["v"], t.get("decay"), t["state"], cu, 0.5]
    operation, flags = linear._forward, (True, True, False)
    if "beta" in t:
        tensors.insert(3, t["beta"])
        operation, flags = delta._forward, (True, True)
    for x in tensors:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_()
    torch.library.opcheck(operation, (*tensors, *flags))


COMPILED = """
import os, sys, torch
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, {folder!r})
from ops.cases import OPS, call, inputs
for op in OPS:
    for packed in (False, True):
        t = inputs(op, (1, 40, 1, 4, 3), states=2 if packed else None, dtype=torch.float32)
        cu = torch.tensor([0, 15, 40], device=device) if packed else None
        leaves = {{n: x.to(device).requires_grad_() for n, x in t.items()}}
        def run(leaves):
            return call(op, leaves, cu_seqlens=cu, impl="triton")["o"]
        plain = run(leaves)
        torch._dynamo.reset()
        fast = torch.compile(run, fullgraph=True, backend="aot_eager")(leaves)
        torch.testing.assert_close(fast, plain)
        w = torch.randn_like(plain)
        for x, y in zip(*(torch.autograd.grad(o, list(leaves.values()), w, allow_unused=True)
                          for o in (plain, fast))):
            torch.testing.assert_close(x, y)
print("compiled")
"""


def test_everything_compiles_as_one_graph():
    """In a process of its own: the checks of annotations cannot be compiled."""
    code = COMPILED.format(folder=str(Path(__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]


@pytest.mark.parametrize("op", OPS)
def test_autocast_changes_no_bit(op):
    tensors = on_device(inputs(op, (1, 33, 1, 8, 6), dtype=torch.float32))
    plain = with_gradients(op, tensors, impl="triton")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        cast = with_gradients(op, tensors, impl="triton")
    for name, x in plain.items():
        assert torch.equal(cast[name], x), name
