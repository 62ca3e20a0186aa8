"""How a fused operation meets PyTorch: as a custom operation inside `torch.compile`, and outside of
it as a plain function, which takes the host a good deal less time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors as kernels read them."""
    return [x if x is None else x.contiguous() for x in tensors]


def needs_gradient(*inputs: Any) -> bool:
    """Whether gradients will be asked of any of the inputs."""
    if torch.is_grad_enabled():
        for x in inputs:
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


def eager(
    compute: Callable[..., Any], setup: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """What a custom operation computes, with the operation's gradient if that is wanted, as a plain
    function."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = compute(*inputs)
            setup(ctx, inputs, output)
            return output

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, *grads)

    apply: Callable[..., Any] = Function.apply

    def call(*inputs: Any) -> Any:
        return apply(*inputs) if needs_gradient(*inputs) else compute(*inputs)

    return call
