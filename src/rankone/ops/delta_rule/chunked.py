"""The delta rule as matrix products over chunks of tokens, with its own backward.

A key reads the state as a query does, and what it reads is what its value is short of. So inside a
chunk the errors E [C, V] that are written are the solution of a triangular system (the WY form,
Yang et al. 2024, section 3). With c the running sum of decay, D_ij = e^(c_i - c_j) for i >= j and
0 above, B = beta K, S the state before the chunk and L the part of K Bᵀ ∘ D below the diagonal:

    (I + L) E = V - e^c K S = F
    O = scale (e^c Q S + P E),   P = Q Bᵀ ∘ D,       S ← e^c_C S + (e^(c_C - c) B)ᵀ E

The inverse X = (I + L)⁻¹ is made for all chunks of a segment at once. The walk does without E:

    S ← e^c_C S + N F,   N = (e^(c_C - c) B)ᵀ X      O = scale (e^c Q S + (P X) F)

Backward, with G = scale dO, E = X F and Z the gradient of the state after the chunk:

    dV = Y = (P X)ᵀ G + Nᵀ Z                     Z ← e^c_C Z + (e^c Q)ᵀ G - (e^c K)ᵀ Y
    dQ = e^c G Sᵀ + R B,   R = G Eᵀ ∘ D          dB = Rᵀ Q + Mᵀ K + e^(c_C - c) E Zᵀ
    dK' = -e^c Y Sᵀ + M B,   M = -Y Eᵀ ∘ D below the diagonal
    dK = dK' + beta dB                           dbeta_i = dB_i·K_i

Decay enters where e^c meets q and k and e^-c meets B, so the gradient of c_i is
q_i·dq_i + k_i·dk'_i - B_i·dB_i, and for c_C as in linear attention.

On the CPU compiled code walks instead: `rankone.ops.walk`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
from torch import Tensor

from rankone.ops.chunks import Chunks, Segment, Step
from rankone.ops.linear_attention.chunked import (
    Decays,
    add_product,
    decay_gradient,
    each,
    end_gradient,
    exactly,
    factors,
    fade,
    fade_,
    fake_starts,
    keeping,
    masked,
    reading,
    scores,
)

CHUNK = 32
"""Tokens in a chunk: the triangular systems are then small."""


class Parts(NamedTuple):
    """A segment of a call in the state's dtype: [n, P, C, …]."""

    v: Tensor
    written: Tensor
    """Bᵀ, [K, C]: tokens are columns."""
    decays: Decays | None
    inverse: Tensor
    """X, [C, C]."""
    inner: Tensor
    """P X, [C, C]: how much each token reads of what those before it were short of."""
    keys: Tensor
    """N, [K, C]: where what tokens were short of is written."""
    erase: Tensor
    """e^c K."""
    read: Tensor
    """e^c Q."""

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
        written = segment.split(k, dtype, times=beta[..., None], across=True)
        q, k, v = (segment.split(x, dtype) for x in (q, k, v))
        decays = None if decay is None else Decays.of(segment.split(decay, dtype))
        since, until, _ = factors(decays)
        inverse = _inverse(masked(k @ written, decays))
        inner = scores(q, written, decays) @ inverse
        keys = written @ fade(inverse, until)
        return cls(v, written, decays, inverse, inner, keys, fade_(k, since), fade_(q, since))

    def step(self, short: Tensor) -> Step:
        """From the state before a chunk to that after it; `short` is V, which becomes F."""
        whole = each(factors(self.decays)[2], len(short))
        keys, erase, rows = self.keys.unbind(), self.erase.unbind(), short.unbind()

        def step(n: int, state: Tensor) -> None:
            rows[n].baddbmm_(erase[n], state, alpha=-1)
            fade_(state, whole[n]).baddbmm_(keys[n], rows[n])

        return step

    def back(self, g: Tensor, dshort: Tensor) -> Step:
        """From the gradient of the state after a chunk to that before it; `dshort` is (P X)ᵀ G,
        which becomes Y."""
        whole = each(factors(self.decays)[2], len(g))
        keys, erase, read = (x.mT.unbind() for x in (self.keys, self.erase, self.read))
        grads, rows = g.unbind(), dshort.unbind()

        def step(n: int, state: Tensor) -> None:
            rows[n].baddbmm_(keys[n], state)
            fade_(state, whole[n]).baddbmm_(read[n], grads[n])
            state.baddbmm_(erase[n], rows[n], alpha=-1)

        return step


def _inverse(system: Tensor) -> Tensor:
    """(I + L)⁻¹ where L is the part of the system below the diagonal."""
    eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    eye = eye.expand(system.shape)
    upper: Tensor = torch.linalg.solve_triangular(system.mT, eye, upper=True, unitriangular=True)
    return upper.mT


@torch.library.custom_op("rankone::delta_rule_chunked", mutates_args=())
@exactly
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
    chunks = Chunks.of(q.shape[1], cu_seqlens, CHUNK)
    output = chunks.room(v, initial.dtype)
    state, final = chunks.begin(initial)
    starts = []
    for segment in chunks.segments():
        p = Parts.of(segment, q, k, v, beta, decay, initial.dtype)
        starts.append(state.clone())
        read = torch.empty_like(p.v)
        segment.forward_scan(state, initial, final, reading(p.read, read, p.step(p.v)))
        segment.put(add_product(read, p.inner, p.v), output, scale)
    return chunks.join(output), chunks.end(state, final), torch.stack(starts)


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
    starts = fake_starts(q, initial, cu_seqlens, CHUNK)
    return initial.new_empty(v.shape), torch.empty_like(initial), starts


@torch.library.custom_op("rankone::delta_rule_chunked_backward", mutates_args=())
@exactly
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
    chunks = Chunks.of(q.shape[1], cu_seqlens, CHUNK)
    grads = [chunks.room(x, initial.dtype) for x in (q, k, v, beta, decay) if x is not None]
    state, grad_initial = chunks.begin(grad_final)
    for n, segment in reversed(list(enumerate(chunks.segments()))):
        p = Parts.of(segment, q, k, v, beta, decay, initial.dtype)
        g = segment.split(grad, initial.dtype, times=scale)
        before, after = segment.states(state), segment.states(state)
        segment.forward_scan(starts[n].clone(), initial, None, keeping(before, p.step(p.v)))
        dv = p.inner.mT @ g
        segment.backward_scan(state, grad_final, grad_initial, keeping(after, p.back(g, dv)))
        inputs = [segment.split(x, initial.dtype) for x in (q, k, beta)]
        found = _segment_gradients(p, *inputs, g, dv, before, after)
        for x, room in zip(found, grads, strict=True):
            segment.put(x, room)
    found = [chunks.join(x) for x in grads]
    if decay is None:
        found.append(initial.new_empty(0))
    return *found, chunks.end(state, grad_initial)


def _segment_gradients(
    p: Parts,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    g: Tensor,
    dv: Tensor,
    states: Tensor,
    dstates: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, beta and, if there is one, decay. `g` is G, `dv` is Y, `states` those
    before the chunks, `dstates` the gradients of those after them."""
    since, until, whole = factors(p.decays)
    errors, written = p.inverse @ p.v, p.written.mT
    r = scores(g, errors.mT, p.decays)
    m = masked(dv @ errors.mT, p.decays).tril_(-1).neg_()
    dq = add_product(fade_(g @ states.mT, since), r, written)
    dk = add_product(fade_(dv @ states.mT, since).neg_(), m, written)
    dwritten = fade_(errors @ dstates.mT, until)
    at_end = None if whole is None else end_gradient(whole, states, dstates, written, dwritten)
    add_product(add_product(dwritten, r.mT, q), m.mT, k)
    dbeta = (dwritten * k).sum(-1)
    ddecay: tuple[Tensor, ...] = ()
    if at_end is not None:
        own = (q * dq).sum(-1) + (k * dk).sum(-1) - beta * dbeta
        ddecay = (decay_gradient(own, at_end),)
    dk += dwritten.mul_(beta[..., None])
    return dq, dk, dv, dbeta, *ddecay


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
