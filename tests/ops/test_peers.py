"""The delta rule as another library has it gives the same numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.cases import assert_close, inputs
from rankone.ops import delta_rule

SHAPE = (2, 130, 2, 16, 24)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def theirs() -> Callable[..., Any]:
    """The form in PyTorch, without what puts a kernel in its place."""
    name = "transformers.models.qwen3_next.modeling_qwen3_next"
    module = pytest.importorskip(name, exc_type=ImportError)
    return inspect.unwrap(module.torch_chunk_gated_delta_rule)


def with_gradients(rule: Callable[..., Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output, last state, and the gradients of a fixed sum over both."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    output, state = rule(leaves)
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=g).to(x.dtype) for x in (output, state)]
    total = sum((w * x).sum() for w, x in zip(weights, (output, state), strict=True))
    grads = torch.autograd.grad(total, list(leaves.values()))
    named = {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}
    return {"o": output.detach(), "state": state.detach()} | named


@pytest.mark.parametrize("with_state", [False, True])
def test_the_reference_is_the_delta_rule_of_transformers(theirs, with_state):
    tensors = inputs("delta_decay", SHAPE, dtype=torch.float32)
    # Theirs subtracts sums of decays: beside a huge one the others are rounded away.
    tensors["decay"] = tensors["decay"].clamp_min(-1.0)
    if not with_state:
        del tensors["state"]

    def ours(x: dict[str, Tensor]) -> Any:
        return delta_rule(
            *(x[name] for name in ("q", "k", "v", "beta")),
            decay=x["decay"],
            initial_state=x.get("state"),
            output_final_state=True,
            impl="reference",
        )

    def peer(x: dict[str, Tensor]) -> Any:
        return theirs(
            *(x[name] for name in ("q", "k", "v")),
            g=x["decay"],
            beta=x["beta"],
            initial_state=x.get("state"),
            output_final_state=True,
        )

    want = with_gradients(ours, {name: x.double() for name, x in tensors.items()})
    assert_close(with_gradients(peer, tensors), want, TOLERANCE, gradients=4.0)
