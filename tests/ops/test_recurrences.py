"""Linear attention and the delta rule: every implementation is the definition."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.cases import OPS, as_products, assert_close, call, inputs, with_gradients
from rankone.ops import delta_rule_step, linear_attention, linear_attention_step

FAST = ("chunked",)
SHAPES = [
    (1, 1, 1, 2, 1),
    (2, 63, 3, 5, 4),
    (1, 64, 2, 16, 16),
    (3, 65, 1, 3, 20),
    (2, 200, 2, 33, 7),
    (1, 1100, 1, 3, 2),  # more than one segment
]


@pytest.fixture(scope="module", autouse=True, params=["products", "walk"])
def _way(request):
    """Everything twice: as products over chunks, and by the compiled walk."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "products":
            as_products(patch)
        yield


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_outputs_states_and_gradients_are_those_of_the_definition(op, shape, impl):
    tensors = inputs(op, shape)
    want = with_gradients(op, tensors, impl="reference")
    assert_close(with_gradients(op, tensors, impl=impl), want, 1e-12)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("op", OPS)
@given(
    shape=st.tuples(
        st.integers(1, 3), st.integers(1, 150), st.integers(1, 3), st.integers(1, 20),
        st.integers(1, 20),
    ),
    seed=st.integers(0, 100),
)  # fmt: skip
@settings(max_examples=15)
def test_any_shape_will_do(op, impl, shape, seed):
    tensors = inputs(op, shape, seed=seed)
    assert_close(call(op, tensors, impl=impl), call(op, tensors, impl="reference"), 1e-11)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 5e-3), (torch.float16, 5e-3)],
    ids=str,
)
@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("op", OPS)
def test_lower_precision_loses_its_rounding_only(op, impl, dtype, tolerance):
    tensors = inputs(op, (2, 130, 2, 16, 12), dtype=dtype)
    want = with_gradients(op, {n: x.double() for n, x in tensors.items()}, impl="reference")
    got = with_gradients(op, tensors, impl=impl)
    assert got["o"].dtype == got["dq"].dtype == dtype
    assert got["state"].dtype == torch.float32
    assert_close(got, want, tolerance, gradients=1.6)


OFFSETS = [
    [0, 1],
    [0, 70],
    [0, 64, 128],
    [0, 3, 3, 100, 101, 230],
    [0, 0, 65, 65],
    [0, 1030, 1030, 1200],
    [0, 1024, 1100],  # a sequence begins with a segment
]


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_packed_sequences_are_computed_apart(op, offsets, impl):
    tensors = inputs(op, (1, offsets[-1], 2, 6, 5), states=len(offsets) - 1)
    packed = with_gradients(op, tensors, impl=impl, cu_seqlens=torch.tensor(offsets))
    leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
    pieces = []
    for n, (a, b) in enumerate(pairwise(offsets)):
        own = {
            name: x[n : n + 1] if name in ("state", "z") else x[:, a:b]
            for name, x in leaves.items()
        }
        if b > a:
            pieces.append(call(op, own, impl="reference"))
        else:
            pieces.append({name: own[name] for name in ("state", "z") if name in own})
    separate = {
        name: torch.cat([p[name] for p in pieces if name in p], dim=1 if name == "o" else 0)
        for name in ("o", "state", "z")
        if name in packed
    }
    total = torch.zeros((), dtype=torch.float64)
    for n, x in enumerate(separate.values()):
        g = torch.Generator().manual_seed(n)
        total = total + (torch.randn(x.shape, generator=g, dtype=torch.float64) * x).sum()
    grads = torch.autograd.grad(total, list(leaves.values()))
    want = {name: x.detach() for name, x in separate.items()}
    want |= {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}
    assert_close(packed, want, 1e-12)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("cut", [1, 40, 64, 100])
@pytest.mark.parametrize("op", OPS)
def test_split_with_state_equals_whole(op, cut, impl):
    tensors = inputs(op, (2, 129, 2, 8, 6))
    whole = call(op, tensors, impl=impl)
    first = {n: x if n in ("state", "z") else x[:, :cut] for n, x in tensors.items()}
    start = call(op, first, impl=impl)
    rest = {n: start[n] if n in ("state", "z") else x[:, cut:] for n, x in tensors.items()}
    end = call(op, rest, impl=impl)
    joined = end | {"o": torch.cat([start["o"], end["o"]], dim=1)}
    assert_close(joined, whole, 1e-12)


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("op", OPS)
def test_the_future_never_changes_the_past_bit_for_bit(op, impl):
    tensors = inputs(op, (1, 150, 2, 8, 6))
    other = inputs(op, (1, 150, 2, 8, 6), seed=1)
    changed = {
        n: x if n in ("state", "z") else torch.cat([x[:, :90], other[n][:, 90:]], dim=1)
        for n, x in tensors.items()
    }
    before, after = (call(op, t, impl=impl)["o"][:, :90] for t in (tensors, changed))
    assert torch.equal(before, after)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("op", OPS)
def test_neighbours_in_a_batch_do_not_matter_and_runs_repeat_to_the_bit(op, impl):
    tensors = inputs(op, (3, 100, 2, 8, 6))
    together = call(op, tensors, impl=impl)["o"]
    assert torch.equal(together, call(op, tensors, impl=impl)["o"])
    alone = call(op, {n: x[1:2] for n, x in tensors.items()}, impl=impl)["o"]
    torch.testing.assert_close(together[1:2], alone, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_those_of_finite_differences(op):
    tensors = inputs(op, (1, 66, 1, 2, 2))
    names = list(tensors)
    leaves = [x.requires_grad_() for x in tensors.values()]

    def values(*given):
        return tuple(call(op, dict(zip(names, given, strict=True)), impl="chunked").values())

    assert torch.autograd.gradcheck(values, leaves, fast_mode=True)


@pytest.mark.parametrize("op", OPS)
def test_without_a_state_it_starts_from_zeros_and_returns_none(op):
    tensors = inputs(op, (2, 10, 2, 4, 3))
    zeros = {n: torch.zeros_like(x) if n in ("state", "z") else x for n, x in tensors.items()}
    bare = {n: x for n, x in tensors.items() if n not in ("state", "z")}
    assert_close(call(op, bare), call(op, zeros), 1e-14)
    assert call(op, bare, output_final_state=False).keys() == {"o"}


@pytest.mark.parametrize("op", OPS)
def test_steps_stream_the_same_numbers(op):
    tensors = inputs(op, (2, 7, 2, 4, 3))
    whole = call(op, tensors, impl="chunked")
    state = tensors["state"]
    state = (state, tensors["z"]) if "z" in tensors else state
    outputs = []
    for t in range(7):
        q, k, v = (tensors[n][:, t] for n in "qkv")
        decay = tensors["decay"][:, t] if "decay" in tensors else None
        if "beta" in tensors:
            o, state = delta_rule_step(q, k, v, tensors["beta"][:, t], state, decay=decay)
        else:
            o, state = linear_attention_step(q, k, v, state, decay=decay, normalize="z" in tensors)
        outputs.append(o)
    torch.testing.assert_close(torch.stack(outputs, dim=1), whole["o"])
    last = state[0] if isinstance(state, tuple) else state
    torch.testing.assert_close(last, whole["state"])


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("offsets", [None, [0, 3, 3, 70]], ids=str)
def test_without_causality_every_token_sees_all_of_its_sequence(impl, normalize, offsets):
    t = inputs("linear_normalized", (1, 70, 2, 5, 4))
    cu = None if offsets is None else torch.tensor(offsets)
    got = linear_attention(
        t["q"], t["k"], t["v"], scale=1.0, causal=False, normalize=normalize, cu_seqlens=cu,
        impl=impl,
    ).output  # fmt: skip
    for a, b in pairwise(offsets or [0, 70]):
        q, k, v = (t[n][0, a:b].movedim(1, 0) for n in "qkv")
        weight = q @ k.mT
        if normalize:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-6)
        torch.testing.assert_close(got[0, a:b].movedim(1, 0), weight @ v)


def test_a_query_without_features_gets_nothing():
    t = inputs("linear_normalized", (1, 5, 1, 3, 2))
    q = t["q"].clone()
    q[:, 3] = 0
    output = linear_attention(q, t["k"], t["v"], normalize=True).output
    assert output[0, 3].abs().max() == 0
    assert bool(torch.isfinite(output).all())


def test_a_delta_rule_with_beta_1_and_unit_keys_recalls_what_was_written_last():
    g = torch.Generator().manual_seed(1)
    keys, _ = torch.linalg.qr(torch.randn(8, 8, generator=g, dtype=torch.float64))
    order = torch.tensor([0, 3, 1, 3, 0, 5])
    values = torch.randn(6, 4, generator=g, dtype=torch.float64)
    tensors = {
        "q": keys[order][None, :, None],
        "k": keys[order][None, :, None],
        "v": values[None, :, None],
        "beta": torch.ones(1, 6, 1, dtype=torch.float64),
    }
    found = call("delta", tensors, scale=1.0)
    torch.testing.assert_close(found["o"][0, :, 0], values)
    torch.testing.assert_close(keys[3] @ found["state"][0, 0], values[3])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("packed", [False, True])
def test_the_operations_keep_the_rules_of_torch_library(op, packed):
    from rankone.ops.delta_rule import chunked as delta
    from rankone.ops.linear_attention import chunked as linear

    t = inputs(op, (1, 70, 2, 4, 3), states=2 if packed else None)
    cu = torch.tensor([0, 20, 70]) if packed else None
    call = [t["q"], t["k"], t["v"], t.get("decay"), t["state"], cu, 0.5]
    operation = linear._forward
    if "beta" in t:
        call.insert(3, t["beta"])
        operation = delta._forward
    for x in call:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_()
    torch.library.opcheck(operation, tuple(call))


COMPILED = """
import sys, torch
sys.path.insert(0, {folder!r})
from ops.cases import OPS, call, inputs
for op in OPS:
    for packed in (False, True):
        t = inputs(op, (1, 70, 2, 4, 3), states=2 if packed else None)
        cu = torch.tensor([0, 20, 70]) if packed else None
        leaves = {{n: x.requires_grad_() for n, x in t.items()}}
        def run(leaves):
            return call(op, leaves, cu_seqlens=cu)["o"]
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_autocast_changes_no_bit(op, dtype):
    tensors = inputs(op, (2, 70, 2, 8, 6), dtype=dtype)
    plain = with_gradients(op, tensors, impl="chunked")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = with_gradients(op, tensors, impl="chunked")
    for name, x in plain.items():
        assert torch.equal(cast[name], x), name


@pytest.mark.parametrize("op", ["linear", "linear_normalized"])
def test_autocast_changes_no_bit_without_causality(op):
    tensors = inputs(op, (2, 70, 2, 8, 6), dtype=torch.float32)
    plain = call(op, tensors, impl="chunked", causal=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = call(op, tensors, impl="chunked", causal=False)
    for name, x in plain.items():
        assert torch.equal(cast[name], x), name


@pytest.mark.parametrize("keys", ["random", "alike"])
def test_float32_is_exact_to_1e_5_over_many_chunks(keys):
    tensors = inputs("delta_decay", (1, 2048, 1, 64, 64), dtype=torch.float32)
    tensors["decay"] = tensors["decay"] * 0.01
    if keys == "alike":
        k = tensors["k"].abs()
        tensors |= {"k": k / k.norm(dim=-1, keepdim=True)}
        tensors["beta"] = torch.ones_like(tensors["beta"])
    exact = {n: x.double() for n, x in tensors.items()}
    want = with_gradients("delta_decay", exact, impl="chunked")
    assert_close(with_gradients("delta_decay", tensors, impl="chunked"), want, 1e-5)
