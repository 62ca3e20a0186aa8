"""The delta rule as matrix products over chunks of tokens, with its own backward.

Inside a chunk what the tokens write, U [C, V], is the solution of a triangular system (the WY form,
Yang et al. 2024, section 3). With c the running sum of decay, D_ij = e^(c_i - c_j) for i >= j, S
the state before the chunk and L the part of beta (K Kᵀ ∘ D) below the diagonal:

    (I + L) U = beta (V - e^c K S)
    O = scale (e^c Q) S + P U,    P = scale (Q Kᵀ ∘ D),    S ← e^c_C S + (e^(c_C - c) K)ᵀ U

U = U_0 - W S with U_0 = (I + L)⁻¹ beta V and W = (I + L)⁻¹ beta e^c K, one solve for all chunks at
once; only the state walks. Backward, with Z the gradient of the state after the chunk:

    dU = Pᵀ dO + (e^(c_C - c) K) Z            Y = (I + L)⁻ᵀ dU,   dL = -Y Uᵀ below the diagonal
    Z ← e^c_C Z + scale (e^c Q)ᵀ dO - Wᵀ dU
    dV = beta Y       dbeta_i = Y_i·(V - e^c K S)_i + (dL ∘ K Kᵀ ∘ D) 1
    dQ = scale e^c dO Sᵀ + R K,   R = scale (dO Uᵀ ∘ D)
    dK = Rᵀ Q + e^(c_C - c) U Zᵀ - beta e^c Y Sᵀ + M K + Mᵀ K,   M = beta dL ∘ D

and decay as in linear attention, with dV instead of all that v enters.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
from torch import Tensor

from rankone.ops.chunks import Chunks, backward_scan, forward_scan
from rankone.ops.linear_attention.chunked import CHUNK, Decays, decay_gradient, fade, scores


class Parts(NamedTuple):
    """A call in chunks, in the state's dtype: [B, H, N, C, …]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    """[B, H, N, C, 1]"""
    decays: Decays | None
    lower: Tensor
    """K Kᵀ ∘ D below the diagonal, [C, C]."""
    system: Tensor
    """L, [C, C]."""
    free: Tensor
    """U_0: what would be written into an empty state."""
    erase: Tensor
    """W: how what is written depends on the state before the chunk."""

    @classmethod
    def of(
        cls,
        chunks: Chunks,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        decay: Tensor | None,
        dtype: torch.dtype,
    ) -> Parts:
        """Splits a call and solves the triangular systems of all chunks."""
        q, k, v, beta = (chunks.split(x).to(dtype) for x in (q, k, v, beta))
        decays = None if decay is None else Decays.of(chunks.split(decay).to(dtype))
        beta = beta[..., None]
        lower = scores(k, k, decays).tril(-1)
        system = beta * lower
        since = None if decays is None else decays.since
        right = torch.cat([v, fade(k, since)], dim=-1)
        solved = torch.linalg.solve_triangular(
            system, beta * right, upper=False, unitriangular=True
        )
        free, erase = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
        return cls(q, k, v, beta, decays, lower, system, free, erase)

    @property
    def factors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """e^c, e^(c_C - c) and e^c_C."""
        return (None, None, None) if self.decays is None else self.decays[:3]

    def states(self, chunks: Chunks, initial: Tensor) -> tuple[Tensor, Tensor]:
        """The state before every chunk, and those at the end."""
        _, until, whole = self.factors
        keys = fade(self.k, until).mT

        def step(n: int, state: Tensor) -> Tensor:
            written = self.free[:, :, n] - self.erase[:, :, n] @ state
            kept = fade(state, None if whole is None else whole[:, :, n])
            return kept + keys[:, :, n] @ written

        return forward_scan(chunks, initial, step)


@torch.library.custom_op("rankone::delta_rule_chunked", mutates_args=())
@no_type_check
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None,
    initial: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    chunks = Chunks.of(q.shape[1], CHUNK, cu_seqlens)
    parts = Parts.of(chunks, q, k, v, beta, decay, initial.dtype)
    states, final = parts.states(chunks, initial)
    written = parts.free - parts.erase @ states
    output = scores(parts.q, parts.k, parts.decays) @ written
    output += fade(parts.q, parts.factors[0]) @ states
    # A custom operation's results may not be its arguments.
    return chunks.join(scale * output), final.clone()


@_forward.register_fake
@no_type_check
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None,
    initial: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> Any:
    return initial.new_empty(v.shape), torch.empty_like(initial)


@torch.library.custom_op("rankone::delta_rule_chunked_backward", mutates_args=())
@no_type_check
def _backward(
    grad: Tensor,
    grad_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None,
    initial: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    chunks = Chunks.of(q.shape[1], CHUNK, cu_seqlens)
    p = Parts.of(chunks, q, k, v, beta, decay, initial.dtype)
    grad = scale * chunks.split(grad).to(initial.dtype)
    since, until, whole = p.factors
    states, _ = p.states(chunks, initial)
    written = p.free - p.erase @ states
    local = scores(p.q, p.k, p.decays).mT @ grad  # the gradient of what is written, read here
    read = fade(p.q, since).mT @ grad
    keys = fade(p.k, until)

    def step(n: int, after: Tensor) -> Tensor:
        dwritten = local[:, :, n] + keys[:, :, n] @ after
        kept = fade(after, None if whole is None else whole[:, :, n])
        return kept + read[:, :, n] - p.erase[:, :, n].mT @ dwritten

    grad_after, grad_initial = backward_scan(chunks, grad_final, step)
    y = torch.linalg.solve_triangular(
        p.system.mT, local + keys @ grad_after, upper=True, unitriangular=True
    )
    dsystem = -(y @ written.mT).tril(-1)
    r = scores(grad, written, p.decays)
    m = p.beta * dsystem
    m = m if p.decays is None else m * p.decays.between
    dq = fade(grad @ states.mT, since) + r @ p.k
    dk = r.mT @ p.q + fade(written @ grad_after.mT, until) + m @ p.k + m.mT @ p.k
    dk -= p.beta * fade(y @ states.mT, since)
    dv = p.beta * y
    surprise = p.v - fade(p.k, since) @ states
    dbeta = (y * surprise).sum(-1) + (dsystem * p.lower).sum(-1)
    ddecay = dq.new_empty(0)
    if whole is not None:
        after = whole * states + keys.mT @ written
        ddecay = chunks.join(decay_gradient(p.q, dq, p.v, dv, after, grad_after))
    dq, dk, dv, dbeta = (chunks.join(x) for x in (dq, dk, dv, dbeta))
    return dq, dk, dv, dbeta, ddecay, grad_initial.clone()


@_backward.register_fake
@no_type_check
def _(
    grad: Tensor,
    grad_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None,
    initial: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> Any:
    new = initial.new_empty
    ddecay = new(0) if decay is None else new(decay.shape)
    return (
        new(q.shape), new(k.shape), new(v.shape), new(beta.shape), ddecay,
        torch.empty_like(initial),
    )  # fmt: skip


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, scale = inputs
    ctx.save_for_backward(*tensors)
    ctx.scale = scale


def _autograd(ctx: Any, grad: Tensor, grad_final: Tensor) -> Any:
    q, k, v, beta, decay, initial, cu_seqlens = ctx.saved_tensors
    *grads, ddecay, dinitial = _backward(
        grad, grad_final, q, k, v, beta, decay, initial, cu_seqlens, ctx.scale
    )
    own = [g.to(x.dtype) for g, x in zip(grads, (q, k, v, beta), strict=True)]
    return *own, None if decay is None else ddecay.to(decay.dtype), dinitial, None, None


_forward.register_autograd(_autograd, setup_context=_setup)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None,
    initial: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs and last states in the state's dtype; shapes are taken as right."""
    output, final = _forward(q, k, v, beta, decay, initial, cu_seqlens, scale)
    return output, final
