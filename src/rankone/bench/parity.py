"""Outputs and gradients of every implementation beside float64, before anything is timed.

Linear attention and the delta rule are held to their definition, or in full length to the form in
chunks, both in float64; softmax attention to the formula in float64. An error is the root mean
square of the difference relative to that of the truth.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rankone import ops
from rankone.bench.cases import SOFTMAX, Case, Record
from rankone.bench.peers import Implementation, Tensors, bind

LIMITS = {
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (5e-3, 8e-3),
    torch.float16: (5e-3, 8e-3),
}
"""dtype → largest relative error of outputs and of gradients."""


class ParityError(ValueError):
    """An implementation of ours is wrong, so that its times mean nothing."""


class Truth(NamedTuple):
    """Output and gradients by name (`o`, `dq`, …) in float64, and where they are from."""

    tensors: Tensors
    source: str


def truth_of(case: Case, inputs: Tensors, impl: str) -> Truth:
    """What `impl`, reference or chunked, makes of the inputs in float64."""
    names = [name for name in inputs if name != "d_o"]
    leaves = {name: inputs[name].detach().double().requires_grad_() for name in names}
    q, k, v, decay = leaves["q"], leaves["k"], leaves["v"], leaves.get("decay")
    if case.op == "delta_rule":
        output = ops.delta_rule(q, k, v, leaves["beta"], decay=decay, impl=impl).output
    else:
        output = ops.linear_attention(q, k, v, decay=decay, impl=impl).output
    return _with_gradients(output, leaves, inputs["d_o"], impl)


def attention_truth(inputs: Tensors) -> Truth:
    """Causal softmax attention as it is written down."""
    leaves = {name: inputs[name].detach().double().requires_grad_() for name in ("q", "k", "v")}
    q, k, v = (x.transpose(1, 2) for x in leaves.values())
    scores = q @ k.mT * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    output = (scores.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(1, 2)
    return _with_gradients(output, leaves, inputs["d_o"], "softmax")


def compare(case: Case, implementation: Implementation, inputs: Tensors, truth: Truth) -> Record:
    """The errors as a record; raises `ParityError` where ours is above its limit."""
    bound = bind(implementation, inputs)
    first, *gradients = bound.forward_backward()
    names = ["o", *(f"d{name}" for name in implementation.leaves)]
    errors = {"o (no gradients)": _error(bound.forward(), truth.tensors["o"], implementation)}
    for name, got in zip(names, [first, *gradients], strict=True):
        errors[name] = _error(got, truth.tensors[name], implementation)
    limit, gradient_limit = LIMITS[case.dtype]
    worst = max((n for n in errors if n.startswith("d")), key=lambda name: errors[name])
    error = max(errors["o"], errors["o (no gradients)"])
    within = error <= limit and errors[worst] <= gradient_limit
    if implementation.ours and not within:
        told = ", ".join(f"{name} {value:.1e}" for name, value in errors.items())
        raise ParityError(
            f"{case.op} with impl={implementation.name!r} is wrong at {tuple(case.shape)}, "
            f"decay={'decay' in implementation.leaves}: errors {told}, where {limit:.0e} is "
            f"allowed for outputs and {gradient_limit:.0e} for gradients: no time is reported"
        )
    return {
        **case.facts("decay" in implementation.leaves),
        "impl": implementation.name,
        "truth": truth.source,
        "error": _finite(error),
        "limit": limit,
        "gradient_error": _finite(errors[worst]),
        "gradient_limit": gradient_limit,
        "worst_gradient": worst,
        "within": within,
    }


def _with_gradients(output: Tensor, leaves: Tensors, d_o: Tensor, source: str) -> Truth:
    gradients = torch.autograd.grad(output, list(leaves.values()), d_o.double())
    named = {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return Truth({"o": output.detach()} | named, source)


def _error(got: Tensor, want: Tensor, implementation: Implementation) -> float:
    """Relative root mean square error; NaN counts as infinite."""
    if implementation.name in SOFTMAX:
        got = got.transpose(1, 2)
    if got.shape != want.shape:
        return math.inf
    error = float((got.double() - want).norm() / want.norm())
    return math.inf if math.isnan(error) else error


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None
