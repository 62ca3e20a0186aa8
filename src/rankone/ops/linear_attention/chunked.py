"""Linear attention as matrix products over chunks of tokens, with its own backward.

With c the running sum of decay inside a chunk, D_ij = e^(c_i - c_j) for i >= j and 0 above, S the
state before the chunk and c_C the sum of the whole chunk:

    O = scale (e^c Q) S + P V,    P = scale (Q Kᵀ ∘ D),    S ← e^c_C S + (e^(c_C - c) K)ᵀ V

Backward, with Z the gradient of the state after the chunk, R = scale (dO Vᵀ ∘ D):

    dQ = scale e^c dO Sᵀ + R K            dK = Rᵀ Q + e^(c_C - c) V Zᵀ
    dV = Pᵀ dO + (e^(c_C - c) K) Z        Z ← e^c_C Z + scale (e^c Q)ᵀ dO

Decay enters only where e^c meets q and e^-c meets v, so the gradient of c_i is q_i·dq_i - v_i·dv_i,
and <Z, S after the chunk> for c_C. Exponents are never positive: nothing overflows.

On the CPU compiled code walks instead: `rankone.ops.walk`.

Chunks are worked on in segments whose temporaries stay in cache. Kept for the backward are the
states at the beginning of the segments; the others are computed again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast, no_type_check

import torch
from torch import Tensor

from rankone.ops.chunks import SEGMENT, Chunks, Segment, Step, count

F = TypeVar("F", bound=Callable[..., Any])

CHUNK = 64
"""Tokens in a chunk."""


class Decays(NamedTuple):
    """What a chunk needs of its decay, all factors at most 1; shapes [n, P, …]."""

    since: Tensor
    """e^c, [C, 1]: how much of the state before the chunk is left at each token."""
    until: Tensor
    """e^(c_C - c), [C, 1]: how much of each token is left at the end."""
    whole: Tensor
    """e^c_C, [1, 1]: how much of the state before the chunk is left at the end."""
    between: Tensor
    """D on and below the diagonal, [C, C]; above it are ones."""

    @classmethod
    def of(cls, decay: Tensor) -> Decays:
        """From log decays [n, P, C]."""
        c = decay.cumsum(-1)
        between = _left(c[..., :, None] - c[..., None, :])
        since = _left(c)[..., None]
        return cls(since, between[..., -1:, :].mT, since[..., -1:, :], between)


def _left(exponent: Tensor) -> Tensor:
    """e^exponent, in place, for exponents of at most 0 (others count as 0).

    What is nearly too small for the dtype is nothing: numbers below its range are very slow.
    """
    least = torch.finfo(exponent.dtype).tiny ** 0.9
    left = exponent.clamp_(math.log(least) - 1, 0).exp_()
    return torch.threshold_(left, least, 0.0)


def factors(decays: Decays | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """e^c, e^(c_C - c) and e^c_C."""
    return (None, None, None) if decays is None else decays[:3]


def fade(x: Tensor, factor: Tensor | None) -> Tensor:
    """`x` times a factor, where there is one."""
    return x if factor is None else x * factor


def scores(a: Tensor, b: Tensor, decays: Decays | None) -> Tensor:
    """a b ∘ D: how much each token gets of those before it and of itself; b is [n, P, K, C]."""
    return masked(a @ b, decays).tril_()


def masked(x: Tensor, decays: Decays | None) -> Tensor:
    """x ∘ D in place, with anything at all above the diagonal."""
    return x if decays is None else x.mul_(decays.between)


def fade_(x: Tensor, factor: Tensor | None) -> Tensor:
    """`x` times a factor in place, where there is one."""
    return x if factor is None else x.mul_(factor)


def walk(whole: Tensor | None, keys: Tensor, values: Tensor) -> Step:
    """A step of a scan: the state fades, and products of keys and values are added."""
    wholes, columns, rows = each(whole, len(keys)), keys.unbind(), values.unbind()

    def step(n: int, state: Tensor) -> None:
        fade_(state, wholes[n]).baddbmm_(columns[n], rows[n])

    return step


def reading(queries: Tensor, read: Tensor, step: Step) -> Step:
    """The same step, after queries have read the state into a place for it."""
    rows, places = queries.unbind(), read.unbind()

    def look(n: int, state: Tensor) -> None:
        torch.bmm(rows[n], state, out=places[n])
        step(n, state)

    return look


def keeping(kept: Tensor, step: Step) -> Step:
    """The same step, after the state has been written down."""
    places = kept.unbind()

    def keep(n: int, state: Tensor) -> None:
        places[n].copy_(state)
        step(n, state)

    return keep


def each(factor: Tensor | None, number: int) -> Sequence[Tensor | None]:
    """The factors of all chunks of a segment."""
    return [None] * number if factor is None else factor.unbind()


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total + a b in place, [n, P, …] each."""
    total.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1))
    return total


def end_gradient(whole: Tensor, states: Tensor, dstates: Tensor, k: Tensor, dk: Tensor) -> Tensor:
    """The gradient of c_C, [n, P]: the product of the state after each chunk and its gradient.
    `dk` is what keys get from that gradient."""
    kept = whole[..., 0, 0] * (states * dstates).sum((-1, -2))
    return kept + (k * dk).sum((-1, -2))


def decay_gradient(own: Tensor, at_end: Tensor) -> Tensor:
    """The gradient of log decays [n, P, C] from those of c [n, P, C] and c_C [n, P]."""
    return own.flip(-1).cumsum(-1).flip(-1) + at_end[..., None]


def fake_starts(q: Tensor, initial: Tensor, cu_seqlens: Tensor | None, size: int) -> Tensor:
    """The shape of the states at the beginning of all segments, with chunks of a size."""
    segments = -(-count(q.shape[1], cu_seqlens, size) // (SEGMENT // size))
    return initial.new_empty(segments, q.shape[0] * q.shape[2], *initial.shape[2:])


class Parts(NamedTuple):
    """A segment of a call in the state's dtype: [n, P, C, …]."""

    q: Tensor
    k: Tensor
    """[K, C]: tokens are columns."""
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
        return cls(
            segment.split(q, dtype),
            segment.split(k, dtype, across=True),
            segment.split(v, dtype),
            None if decay is None else Decays.of(segment.split(decay, dtype)),
        )

    def step(self) -> Step:
        """From the state before a chunk to that after it."""
        _, until, whole = factors(self.decays)
        return walk(whole, fade(self.k.mT, until).mT, self.v)


def exactly(function: F) -> F:
    """The function with its products in the dtype of their operands, whatever autocast says."""

    @functools.wraps(function)
    @no_type_check
    def run(*args: Any, **options: Any) -> Any:
        device = next(x.device.type for x in args if isinstance(x, Tensor))
        with torch.autocast(device, enabled=False):
            return function(*args, **options)

    return cast(F, run)


@torch.library.custom_op("rankone::linear_attention_chunked", mutates_args=())
@exactly
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
    chunks = Chunks.of(q.shape[1], cu_seqlens, CHUNK)
    output = chunks.room(v, initial.dtype)
    state, final = chunks.begin(initial)
    starts = []
    for segment in chunks.segments():
        p = Parts.of(segment, q, k, v, decay, initial.dtype)
        starts.append(state.clone())
        inner, read = scores(p.q, p.k, p.decays), torch.empty_like(p.v)
        step = reading(fade_(p.q, factors(p.decays)[0]), read, p.step())
        segment.forward_scan(state, initial, final, step)
        segment.put(add_product(read, inner, p.v), output, scale)
    return chunks.join(output), chunks.end(state, final), torch.stack(starts)


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
    starts = fake_starts(q, initial, cu_seqlens, CHUNK)
    return initial.new_empty(v.shape), torch.empty_like(initial), starts


@torch.library.custom_op("rankone::linear_attention_chunked_backward", mutates_args=())
@exactly
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
    chunks = Chunks.of(q.shape[1], cu_seqlens, CHUNK)
    grads = [chunks.room(x, initial.dtype) for x in (q, k, v, decay) if x is not None]
    state, grad_initial = chunks.begin(grad_final)
    for n, segment in reversed(list(enumerate(chunks.segments()))):
        p = Parts.of(segment, q, k, v, decay, initial.dtype)
        g = segment.split(grad, initial.dtype, times=scale)
        before, after = segment.states(state), segment.states(state)
        segment.forward_scan(starts[n].clone(), initial, None, keeping(before, p.step()))
        since, _, whole = factors(p.decays)
        step = walk(whole, fade(p.q, since).mT, g)
        segment.backward_scan(state, grad_final, grad_initial, keeping(after, step))
        for x, room in zip(_segment_gradients(p, g, before, after), grads, strict=True):
            segment.put(x, room)
    found = [chunks.join(x) for x in grads]
    if decay is None:
        found.append(initial.new_empty(0))
    return *found, chunks.end(state, grad_initial)


def _segment_gradients(p: Parts, g: Tensor, states: Tensor, dstates: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and, if there is one, decay. `g` is scale dO, `states` those before the
    chunks, `dstates` the gradients of those after them."""
    since, until, whole = factors(p.decays)
    r = scores(g, p.v.mT, p.decays)
    dq = add_product(fade_(g @ states.mT, since), r, p.k.mT)
    dk = fade_(p.v @ dstates.mT, until)
    at_end = None if whole is None else end_gradient(whole, states, dstates, p.k.mT, dk)
    add_product(dk, r.mT, p.q)
    dv = scores(p.q, p.k, p.decays).mT @ g
    add_product(dv, fade(p.k.mT, until), dstates)
    if at_end is None:
        return dq, dk, dv
    return dq, dk, dv, decay_gradient((p.q * dq).sum(-1) - (p.v * dv).sum(-1), at_end)


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


@exactly
def everything(
    q: Tensor, k: Tensor, v: Tensor, initial: Tensor, scale: float, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The non-causal form: every token sees all tokens of its sequence."""
    chunks = Chunks.of(q.shape[1], cu_seqlens, CHUNK)
    if chunks.packing is None:
        q, k, v = (x.to(initial.dtype) for x in (q, k, v))
        state = initial + torch.einsum("bthk,bthv->bhkv", k, v)
        return scale * torch.einsum("bthk,bhkv->bthv", q, state), state
    owner, whole = chunks.packing.sequence, Segment(chunks, 0, chunks.number)
    q, k, v = (whole.split(x, initial.dtype) for x in (q, k, v))  # [N, H, C, …]
    state = initial.index_add(0, owner, k.mT @ v)
    output = (scale * (q @ state[owner])).movedim(1, 2).flatten(0, 1)
    return chunks.join(output[None]), state
