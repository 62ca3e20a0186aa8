"""Linear attention as matrix products over chunks of tokens, with its own backward.

With c the running sum of decay inside a chunk, D_ij = e^(c_i - c_j) for i >= j and 0 above, S the
state before the chunk and c_C the sum of the whole chunk:

    O = scale (e^c Q) S + P V,    P = scale (Q Kᵀ ∘ D),    S ← e^c_C S + (e^(c_C - c) K)ᵀ V

Backward, with Z the gradient of the state after the chunk, R = scale (dO Vᵀ ∘ D):

    dQ = scale e^c dO Sᵀ + R K            dK = Rᵀ Q + e^(c_C - c) V Zᵀ
    dV = Pᵀ dO + (e^(c_C - c) K) Z        Z ← e^c_C Z + scale (e^c Q)ᵀ dO

Decay enters only where e^c meets q and e^-c meets v, so the gradient of c_i is q_i·dq_i - v_i·dv_i,
and <Z, S after the chunk> for c_C. Exponents are never positive: nothing overflows.

Chunks are worked on in segments whose temporaries stay in cache. Kept for the backward are the
states at the beginning of the segments; the others are computed again.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
from torch import Tensor

from rankone.ops.chunks import CHUNK, SEGMENT, Chunks, Segment, Step


class Decays(NamedTuple):
    """What a chunk needs of its decay, all factors at most 1; shapes [B, H, n, …]."""

    since: Tensor
    """e^c, [C, 1]: how much of the state before the chunk is left at each token."""
    until: Tensor
    """e^(c_C - c), [C, 1]: how much of each token is left at the end."""
    whole: Tensor
    """e^c_C, [1, 1]: how much of the state before the chunk is left at the end."""
    between: Tensor
    """D, [C, C]."""

    @classmethod
    def of(cls, decay: Tensor) -> Decays:
        """From log decays [B, H, n, C]."""
        c = decay.cumsum(-1)
        total = c[..., -1:]
        gap = c[..., :, None] - c[..., None, :]
        above = torch.ones(gap.shape[-2:], dtype=torch.bool, device=gap.device).triu(1)
        between = gap.masked_fill_(above, -torch.inf).exp_()
        return cls(
            c.exp()[..., None], (total - c).exp()[..., None], total.exp()[..., None], between
        )


def fade(x: Tensor, factor: Tensor | None) -> Tensor:
    """`x` times a factor, where there is one."""
    return x if factor is None else x * factor


def scores(a: Tensor, b: Tensor, decays: Decays | None) -> Tensor:
    """a bᵀ ∘ D: how much each token gets of those before it and of itself."""
    product = a @ b.mT
    return product.tril_() if decays is None else product.mul_(decays.between)


def walk(whole: Tensor | None, added: Tensor) -> Step:
    """A step of a scan: what was there fades, and something is added."""

    def step(n: int, state: Tensor) -> Tensor:
        return fade(state, None if whole is None else whole[:, :, n]) + added[:, :, n]

    return step


def decay_gradient(
    q: Tensor, dq: Tensor, v: Tensor, dv: Tensor, after: Tensor, grad_after: Tensor
) -> Tensor:
    """The gradient of log decays [B, H, n, C]; `after` is the state after each chunk."""
    own = (q * dq).sum(-1) - (v * dv).sum(-1)
    at_end = (after * grad_after).sum((-1, -2))
    return own.flip(-1).cumsum(-1).flip(-1) + at_end[..., None]


def fake_starts(q: Tensor, initial: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The shape of the states at the beginning of all segments."""
    number = -(-q.shape[1] // CHUNK)
    if cu_seqlens is not None:
        number = q.shape[1] // CHUNK + cu_seqlens.shape[0] - 1
    return initial.new_empty(-(-number // SEGMENT), q.shape[0], *initial.shape[1:])


class Parts(NamedTuple):
    """A segment of a call in the state's dtype: [B, H, n, C, …]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decays: Decays | None

    @classmethod
    def of(
        cls,
        segment: Segment,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        dtype: torch.dtype,
    ) -> Parts:
        """The segment's part of a call."""
        q, k, v = (segment.split(x, dtype) for x in (q, k, v))
        return cls(q, k, v, None if decay is None else Decays.of(segment.split(decay, dtype)))

    @property
    def factors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """e^c, e^(c_C - c) and e^c_C."""
        return (None, None, None) if self.decays is None else self.decays[:3]

    def step(self) -> Step:
        """From the state before a chunk to that after it."""
        _, until, whole = self.factors
        return walk(whole, fade(self.k, until).mT @ self.v)


@torch.library.custom_op("rankone::linear_attention_chunked", mutates_args=())
@no_type_check
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    initial: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    chunks = Chunks.of(q.shape[1], cu_seqlens)
    state, final = chunks.begin(initial)
    outputs, starts = [], []
    for segment in chunks.segments():
        p = Parts.of(segment, q, k, v, decay, initial.dtype)
        starts.append(state)
        states, state, final = segment.forward_scan(state, initial, final, p.step())
        read = scores(p.q, p.k, p.decays) @ p.v
        read += fade(p.q, p.factors[0]) @ states
        outputs.append(read.mul_(scale))
    return chunks.join(outputs), chunks.end(state, final), torch.stack(starts)


@_forward.register_fake
@no_type_check
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    initial: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> Any:
    starts = fake_starts(q, initial, cu_seqlens)
    return initial.new_empty(v.shape), torch.empty_like(initial), starts


@torch.library.custom_op("rankone::linear_attention_chunked_backward", mutates_args=())
@no_type_check
def _backward(
    grad: Tensor,
    grad_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    initial: Tensor,
    starts: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    chunks = Chunks.of(q.shape[1], cu_seqlens)
    state, grad_initial = chunks.begin(grad_final)
    found = []
    for n, segment in reversed(list(enumerate(chunks.segments()))):
        p = Parts.of(segment, q, k, v, decay, initial.dtype)
        since, until, whole = p.factors
        g = segment.split(grad, initial.dtype).mul_(scale)
        states, _, _ = segment.forward_scan(starts[n], initial, initial, p.step())
        after, state, grad_initial = segment.backward_scan(
            state, grad_final, grad_initial, walk(whole, fade(p.q, since).mT @ g)
        )
        r = scores(g, p.v, p.decays)
        dq = fade(g @ states.mT, since) + r @ p.k
        dk = r.mT @ p.q + fade(p.v @ after.mT, until)
        dv = scores(p.q, p.k, p.decays).mT @ g + fade(p.k, until) @ after
        ddecay = ()
        if whole is not None:
            ends = whole * states + fade(p.k, until).mT @ p.v
            ddecay = (decay_gradient(p.q, dq, p.v, dv, ends, after),)
        found.append((dq, dk, dv, *ddecay))
    grads = [chunks.join(parts) for parts in zip(*found[::-1], strict=True)]
    if decay is None:
        grads.append(initial.new_empty(0))
    return *grads, chunks.end(state, grad_initial)


@_backward.register_fake
@no_type_check
def _(
    grad: Tensor,
    grad_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    initial: Tensor,
    starts: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> Any:
    new = initial.new_empty
    ddecay = new(0) if decay is None else new(decay.shape)
    return new(q.shape), new(k.shape), new(v.shape), ddecay, torch.empty_like(initial)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, scale = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.scale = scale


def _autograd(ctx: Any, grad: Tensor, grad_final: Tensor, _: Any) -> Any:
    q, k, v, decay, initial, cu_seqlens, starts = ctx.saved_tensors
    dq, dk, dv, ddecay, dinitial = _backward(
        grad, grad_final, q, k, v, decay, initial, starts, cu_seqlens, ctx.scale
    )
    ddecay = None if decay is None else ddecay.to(decay.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), ddecay, dinitial, None, None


_forward.register_autograd(_autograd, setup_context=_setup)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    initial: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs and last states in the state's dtype; shapes are taken as right."""
    output, final, _ = _forward(q, k, v, decay, initial, cu_seqlens, scale)
    return output, final


def everything(
    q: Tensor, k: Tensor, v: Tensor, initial: Tensor, scale: float, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The non-causal form: every token sees all tokens of its sequence."""
    chunks = Chunks.of(q.shape[1], cu_seqlens)
    if chunks.packing is None:
        q, k, v = (x.to(initial.dtype) for x in (q, k, v))
        state = initial + torch.einsum("bthk,bthv->bhkv", k, v)
        return scale * torch.einsum("bthk,bhkv->bthv", q, state), state
    owner, whole = chunks.packing.sequence, Segment(chunks, 0, chunks.number)
    q, k, v = (whole.split(x, initial.dtype)[0] for x in (q, k, v))  # [H, N, C, …]
    state = initial.index_add(0, owner, (k.mT @ v).movedim(1, 0))
    output = scale * (q @ state[owner].movedim(0, 1))
    return chunks.join([output[None]]), state
