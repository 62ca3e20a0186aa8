"""Inputs of the recurrences, and one way to call both of them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from rankone.ops import delta_rule, linear_attention

OPS = ("linear", "linear_decay", "linear_normalized", "delta", "delta_decay")


def as_products(patch: pytest.MonkeyPatch) -> None:
    """On the CPU too the form in chunks is products, as it is on other devices."""
    for op in ("delta_rule", "linear_attention"):
        patch.setattr(import_module(f"rankone.ops.{op}.api"), "walks", lambda device: False)


def inputs(
    op: str,
    shape: tuple[int, int, int, int, int],
    *,
    states: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Tensors of a call by name: q, k, v, then beta, decay, and the initial state's parts."""
    B, T, H, K, V = shape
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64)

    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V)
    found = {"q": q, "k": k / k.norm(dim=-1, keepdim=True), "v": v}
    if op == "linear_normalized":
        found |= {"q": q.abs(), "k": k.abs()}
    if op.startswith("delta"):
        found["beta"] = 2 * torch.rand(B, T, H, generator=g, dtype=torch.float64)
    if op.endswith("decay"):
        decay = -torch.rand(B, T, H, generator=g, dtype=torch.float64)
        if T > 3:
            decay[:, T // 2] = -80.0  # everything before is forgotten
        found["decay"] = decay
    found = {name: x.to(dtype) for name, x in found.items()}
    state = torch.float64 if dtype == torch.float64 else torch.float32
    found["state"] = normal(states or B, H, K, V).to(state)
    if op == "linear_normalized":
        found["z"] = normal(states or B, H, K).abs().to(state)
    return found


def call(op: str, tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """The outputs of a call by name: o, state, and z where there is one."""
    t = dict(tensors)
    q, k, v = t.pop("q"), t.pop("k"), t.pop("v")
    state = t.pop("state", None)
    options = {"output_final_state": True, "decay": t.pop("decay", None)} | options
    if op.startswith("delta"):
        output, final = delta_rule(q, k, v, t.pop("beta"), initial_state=state, **options)
        return {"o": output} if final is None else {"o": output, "state": final}
    normalize = op == "linear_normalized"
    if normalize and state is not None:
        state = (state, t.pop("z"))
    output, final = linear_attention(q, k, v, initial_state=state, normalize=normalize, **options)
    if final is None:
        return {"o": output}
    return (
        {"o": output, "state": final[0], "z": final[1]}
        if normalize
        else {
            "o": output,
            "state": final,
        }
    )


def with_gradients(op: str, tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Outputs, and the gradients of a fixed sum over all of them by every input."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    outputs = call(op, leaves, **options)
    total = torch.zeros((), dtype=torch.float64, device=outputs["o"].device)
    for n, x in enumerate(outputs.values()):
        g = torch.Generator().manual_seed(n)
        weight = torch.randn(x.shape, generator=g, dtype=torch.float64)
        total = total + (weight.to(x.device) * x.double()).sum()
    grads = torch.autograd.grad(total, list(leaves.values()))
    named = {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
    return {name: x.detach() for name, x in outputs.items()} | named


def assert_close(
    got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float, *, gradients: float = 1.0
) -> None:
    """Relative root mean square error of every tensor; gradients may have a factor more."""
    assert got.keys() == want.keys()
    for name, ours in got.items():
        truth = want[name].double()
        assert ours.shape == truth.shape, name
        error = float((ours.double() - truth).norm() / truth.norm().clamp_min(1e-30))
        limit = tolerance * (gradients if name.startswith("d") else 1.0)
        assert error <= limit, (name, error)
