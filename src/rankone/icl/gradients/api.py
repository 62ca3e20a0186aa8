"""The training step's one expensive function, and which implementation of it runs.

`reference` is autograd over the Gram recursion, on any device and in any precision; `fused_cpu`
holds a block of prompts in cache, one a SIMD lane (numba); `fused_gpu` holds it in registers
(Triton). All return the loss averaged over the query and its gradient, for many models at once.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rankone.errors import BackendUnavailableError
from rankone.icl.model import KINDS, Kind

IMPLEMENTATIONS = ("auto", "reference", "fused_cpu", "fused_gpu")
LARGEST_FUSED_DIM = 31


class LossAndGrad(NamedTuple):
    """Mean loss a member, and the gradient of it for the member's parameters."""

    loss: Float[Tensor, " R"]
    p: Float[Tensor, "R L H *shape"]
    q: Float[Tensor, "R L H *shape2"]


def choose(impl: str, device: torch.device, dim: int) -> tuple[str, str]:
    """The implementation that `impl` means on a device, and why.

    A named implementation never falls back: it is available or BackendUnavailableError says
    what is missing.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if impl == "reference":
        return "reference", "asked for"
    fused, package = ("fused_gpu", "triton") if device.type == "cuda" else ("fused_cpu", "numba")
    missing = None
    if impl not in ("auto", fused):
        needed = "a CUDA device" if impl == "fused_gpu" else "the CPU"
        missing = f"{impl} needs tensors on {needed}, got {device}"
    elif device.type not in ("cpu", "cuda"):
        missing = f"no fused kernel for {device.type}"
    elif find_spec(package) is None:
        missing = f"{fused} needs {package}, which is not installed"
    elif dim > LARGEST_FUSED_DIM:
        missing = f"{fused} holds at most {LARGEST_FUSED_DIM} features, got {dim}"
    if missing is None:
        return fused, f"{package} is installed and the tensors are on {device.type}"
    if impl == "auto":
        return "reference", missing
    raise BackendUnavailableError(missing)


def loss_and_grad(
    kind: Kind,
    p: Float[Tensor, "R L H *shape"],
    q: Float[Tensor, "R L H *shape2"],
    gram: Float[Tensor, "S B D D"],
    weights: Float[Tensor, "S B d"],
    stream: Int[Tensor, " R"],
    *,
    importance: Float[Tensor, "S B"] | None = None,
    limit: float | Float[Tensor, " R"] = math.inf,
    impl: str = "auto",
) -> LossAndGrad:
    """½ E‖w_hat - w‖² of R models and its gradient.

    Member r has parameters p[r], q[r] (shapes as in `parameter_shapes`) and reads the prompts
    gram[stream[r]], weights[stream[r]]. The expectation over the query x ~ N(0, I) is exact.

    `importance` weighs the prompts (default: all 1); the loss is the mean of weight times loss.
    With a finite `limit` the square s = ‖w_hat - w‖² of a prompt counts as
    limit · asinh(s / limit): the same where s is far below the limit, logarithmic above. A deep
    model is a polynomial of degree 3^L, so that a prompt on which it explodes has a gradient of
    any size; so it has not. A tensor gives each member a limit of its own, positive or infinite.
    """
    dim = weights.shape[-1]
    _check_shapes(kind, p, q, gram, weights, stream)
    limits = _limit_of_each(limit, p)
    if importance is None:
        importance = torch.ones_like(weights[..., 0])
    elif importance.shape != weights.shape[:2]:
        raise ValueError(
            f"importance must have shape [S, B] = {tuple(weights.shape[:2])}, "
            f"got {tuple(importance.shape)}"
        )
    # The kernels count elements, so everything is contiguous.
    data = (
        gram.contiguous(),
        weights.contiguous(),
        stream.contiguous(),
        importance.contiguous(),
        limits,
    )
    name, _ = choose(impl, gram.device, dim)
    if name == "reference":
        from rankone.icl.gradients import reference

        return LossAndGrad(*reference.loss_and_grad(kind, p, q, *data))
    if name == "fused_cpu":
        from rankone.icl.gradients import fused_cpu as fused
    else:
        from rankone.icl.gradients import fused_gpu as fused  # type: ignore[no-redef]
    if kind == "full":
        p, q = p.contiguous(), q.contiguous()
        return LossAndGrad(*fused.full_loss_and_grad(p, q, *data))
    # One head or many, a diagonal model acts through omega = sum_h p_h q_hᵀ alone. Sums of products
    # and not einsum, which costs the host more than the kernel costs the device.
    wide_q = torch.nn.functional.pad(q, (0, 1)) if kind == "gd++" else q
    omega = (p[..., :, None] * wide_q[..., None, :]).sum(2)
    loss, grad = fused.diag_loss_and_grad(omega.flatten(-2), *data)
    grad = grad.view(*grad.shape[:-1], 2, 2)[:, :, None]
    grad_p = (grad * wide_q[..., None, :]).sum(-1)
    grad_q = (grad[..., : q.shape[-1]] * p[..., :, None]).sum(-2)
    return LossAndGrad(loss, grad_p, grad_q)


def _limit_of_each(limit: float | Tensor, p: Tensor) -> Float[Tensor, " R"]:
    """A limit a member; a tensor's values are not looked at, which would wait for the device."""
    if not isinstance(limit, Tensor):
        if not limit > 0:
            raise ValueError(f"limit must be positive, got {limit}")
        return p.new_full(p.shape[:1], limit)
    if limit.shape != p.shape[:1]:
        raise ValueError(
            f"limit must be a number or have shape [R] = ({p.shape[0]},), got {tuple(limit.shape)}"
        )
    return limit.to(p).contiguous()


def _check_shapes(
    kind: Kind, p: Tensor, q: Tensor, gram: Tensor, weights: Tensor, stream: Tensor
) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    D = weights.shape[-1] + 1
    tails = {"full": ((D, D), (D, D)), "diag": ((2,), (2,)), "gd++": ((2,), (1,))}[kind]
    for name, tensor, tail in (("p", p, tails[0]), ("q", q, tails[1])):
        if tuple(tensor.shape[3:]) != tail or tensor.shape[:3] != p.shape[:3]:
            expected = (*p.shape[:3], *tail)
            raise ValueError(
                f"{name} of {kind} models must have shape {expected}, got {tuple(tensor.shape)}"
            )
    if gram.shape != (*weights.shape[:2], D, D):
        raise ValueError(
            f"gram must have shape [S, B, d+1, d+1] = {(*weights.shape[:2], D, D)}, "
            f"got {tuple(gram.shape)}"
        )
    if stream.shape != (p.shape[0],):
        raise ValueError(f"stream must have shape [R] = ({p.shape[0]},), got {tuple(stream.shape)}")
    # A look at the values of a tensor on a GPU would wait for it.
    if (
        stream.device.type == "cpu"
        and len(stream)
        and not 0 <= stream.min() <= stream.max() < len(gram)
    ):
        raise ValueError(f"stream must be from 0 to {len(gram) - 1}, got {stream.tolist()}")
