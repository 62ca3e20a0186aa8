"""The delta rule as matrix products over chunks of tokens, with its own backward.

Inside a chunk what the tokens write, U [C, V], is the solution of a triangular system (the WY form,
Yang et al. 2024, section 3). With c the running sum of decay, D_ij = e^(c_i - c_j) for i >= j, S
the state before the chunk and L the part of beta (K Kᵀ ∘ D) below the diagonal:

    (I + L) U = beta (V - e^c K S)
    O = scale (e^c Q) S + P U,    P = scale (Q Kᵀ ∘ D),    S ← e^c_C S + (e^(c_C - c) K)ᵀ U

U = U_0 - W S with U_0 = (I + L)⁻¹ beta V and W = (I + L)⁻¹ beta e^c K, one solve for all chunks of
a segment at once; only the state walks. Backward, with Z the gradient of the state after the chunk:

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

from rankone.ops.chunks import Chunks, Segment, Step
from rankone.ops.linear_attention.chunked import (
    Decays,
    decay_gradient,
    fade,
    fake_starts,
    scores,
)


class Parts(NamedTuple):
    """A segment of a call in the state's dtype: [B, H, n, C, …]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    """[B, H, n, C, 1]"""
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
        segment: Segment,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        decay: Tensor | None,
        dtype: torch.dtype,
    ) -> Parts:
        """The segment's part of a call, with the triangular systems solved."""
        q, k, v, beta = (segment.split(x, dtype) for x in (q, k, v, beta))
        decays = None if decay is None else Decays.of(segment.split(decay, dtype))
        beta = beta[..., None]
        lower = scores(k, k, decays).tril_(-1)
        system = beta * lower
        since = None if decays is None else decays.since
        right = torch.cat([v, fade(k, since)], dim=-1).mul_(beta)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        free, erase = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
        return cls(q, k, v, beta, decays, lower, system, free, erase)

    @property
    def factors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """e^c, e^(c_C - c) and e^c_C."""
        return (None, None, None) if self.decays is None else self.decays[:3]

    def written(self, states: Tensor) -> Tensor:
        """U, from the states before the chunks."""
        return self.free - self.erase @ states

    def step(self) -> Step:
        """From the state before a chunk to that after it."""
        _, until, whole = self.factors
        keys = fade(self.k, until).mT

        def step(n: int, state: Tensor) -> Tensor:
            written = self.free[:, :, n] - self.erase[:, :, n] @ state
            kept = fade(state, None if whole is None else whole[:, :, n])
            return kept + keys[:, :, n] @ written

        return step

    def back(self, local: Tensor, read: Tensor) -> Step:
        """From the gradient of the state after a chunk to that before it: `local` is the gradient
        of what is written and read in the same chunk, `read` that of the state which is read."""
        _, until, whole = self.factors
        keys = fade(self.k, until)

        def step(n: int, after: Tensor) -> Tensor:
            dwritten = local[:, :, n] + keys[:, :, n] @ after
            kept = fade(after, None if whole is None else whole[:, :, n])
            return kept + read[:, :, n] - self.erase[:, :, n].mT @ dwritten

        return step


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
) -> tuple[Tensor, Tensor, Tensor]:
    chunks = Chunks.of(q.shape[1], cu_seqlens)
    state, final = chunks.begin(initial)
    outputs, starts = [], []
    for segment in chunks.segments():
        p = Parts.of(segment, q, k, v, beta, decay, initial.dtype)
        starts.append(state)
        states, state, final = segment.forward_scan(state, initial, final, p.step())
        read = scores(p.q, p.k, p.decays) @ p.written(states)
        read += fade(p.q, p.factors[0]) @ states
        outputs.append(read.mul_(scale))
    return chunks.join(outputs), chunks.end(state, final), torch.stack(starts)


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
    starts = fake_starts(q, initial, cu_seqlens)
    return initial.new_empty(v.shape), torch.empty_like(initial), starts


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
    starts: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    chunks = Chunks.of(q.shape[1], cu_seqlens)
    state, grad_initial = chunks.begin(grad_final)
    found = []
    for n, segment in reversed(list(enumerate(chunks.segments()))):
        p = Parts.of(segment, q, k, v, beta, decay, initial.dtype)
        g = segment.split(grad, initial.dtype).mul_(scale)
        states, _, _ = segment.forward_scan(starts[n], initial, initial, p.step())
        local = scores(p.q, p.k, p.decays).mT @ g
        after, state, grad_initial = segment.backward_scan(
            state, grad_final, grad_initial, p.back(local, fade(p.q, p.factors[0]).mT @ g)
        )
        found.append(_segment_gradients(p, g, states, after, local))
    grads = [chunks.join(parts) for parts in zip(*found[::-1], strict=True)]
    if decay is None:
        grads.append(initial.new_empty(0))
    return *grads, chunks.end(state, grad_initial)


def _segment_gradients(
    p: Parts, g: Tensor, states: Tensor, after: Tensor, local: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, beta and, if there is one, decay. `g` is scale dO, `states` those
    before the chunks, `after` the gradients of the states after them, `local` Pᵀ dO."""
    since, until, whole = p.factors
    keys, written = fade(p.k, until), p.written(states)
    y = torch.linalg.solve_triangular(
        p.system.mT, local + keys @ after, upper=True, unitriangular=True
    )
    dsystem = -(y @ written.mT).tril_(-1)
    r = scores(g, written, p.decays)
    m = p.beta * dsystem
    m = m if p.decays is None else m.mul_(p.decays.between)
    dq = fade(g @ states.mT, since) + r @ p.k
    dk = r.mT @ p.q + fade(written @ after.mT, until)
    dk += (m + m.mT) @ p.k - p.beta * fade(y @ states.mT, since)
    dv = p.beta * y
    surprise = p.v - fade(p.k, since) @ states
    dbeta = (y * surprise).sum(-1) + (dsystem * p.lower).sum(-1)
    if whole is None:
        return dq, dk, dv, dbeta
    ends = whole * states + keys.mT @ written
    return dq, dk, dv, dbeta, decay_gradient(p.q, dq, p.v, dv, ends, after)


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
    starts: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> Any:
    new = initial.new_empty
    ddecay = new(0) if decay is None else new(decay.shape)
    grads = (new(x.shape) for x in (q, k, v, beta))
    return *grads, ddecay, torch.empty_like(initial)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, scale = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.scale = scale


def _autograd(ctx: Any, grad: Tensor, grad_final: Tensor, _: Any) -> Any:
    q, k, v, beta, decay, initial, cu_seqlens, starts = ctx.saved_tensors
    *grads, ddecay, dinitial = _backward(
        grad, grad_final, q, k, v, beta, decay, initial, starts, cu_seqlens, ctx.scale
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
    output, final, _ = _forward(q, k, v, beta, decay, initial, cu_seqlens, scale)
    return output, final
