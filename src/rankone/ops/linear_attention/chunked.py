"""Linear attention as matrix products over chunks of tokens, with its own backward.

With c the running sum of decay inside a chunk, D_ij = e^(c_i - c_j) for i >= j and 0 above, S the
state before the chunk and c_C the sum of the whole chunk:

    O = scale (e^c Q) S + P V,    P = scale (Q Kᵀ ∘ D),    S ← e^c_C S + (e^(c_C - c) K)ᵀ V

Backward, with Z the gradient of the state after the chunk, R = scale (dO Vᵀ ∘ D):

    dQ = scale e^c dO Sᵀ + R K            dK = Rᵀ Q + e^(c_C - c) V Zᵀ
    dV = Pᵀ dO + (e^(c_C - c) K) Z        Z ← e^c_C Z + scale (e^c Q)ᵀ dO

Decay enters only where e^c meets q and e^-c meets v, so the gradient of c_i is q_i·dq_i - v_i·dv_i,
and <Z, S after the chunk> for c_C. Exponents are never positive: nothing overflows.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
from torch import Tensor

from rankone.ops.chunks import Chunks, backward_scan, forward_scan

CHUNK = 64


class Decays(NamedTuple):
    """What a chunk needs of its decay, all factors at most 1; shapes [B, H, N, …]."""

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
        """From log decays [B, H, N, C]."""
        c = decay.cumsum(-1)
        total = c[..., -1:]
        gap = c[..., :, None] - c[..., None, :]
        above = torch.ones(gap.shape[-2:], dtype=torch.bool, device=gap.device).triu(1)
        between = gap.masked_fill(above, -torch.inf).exp()
        return cls(
            c.exp()[..., None], (total - c).exp()[..., None], total.exp()[..., None], between
        )


def fade(x: Tensor, factor: Tensor | None) -> Tensor:
    """`x` times a factor, where there is one."""
    return x if factor is None else x * factor


def scores(a: Tensor, b: Tensor, decays: Decays | None) -> Tensor:
    """a bᵀ ∘ D: how much each token gets of those before it and of itself."""
    product = a @ b.mT
    return product.tril() if decays is None else product * decays.between


def decay_gradient(
    q: Tensor, dq: Tensor, v: Tensor, dv: Tensor, after: Tensor, grad_after: Tensor
) -> Tensor:
    """The gradient of log decays [B, H, N, C]; `after` is the state after each chunk."""
    own = (q * dq).sum(-1) - (v * dv).sum(-1)
    at_end = (after * grad_after).sum((-1, -2))
    return own.flip(-1).cumsum(-1).flip(-1) + at_end[..., None]


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
) -> tuple[Tensor, Tensor]:
    chunks = Chunks.of(q.shape[1], CHUNK, cu_seqlens)
    q, k, v = (chunks.split(x).to(initial.dtype) for x in (q, k, v))
    decays = None if decay is None else Decays.of(chunks.split(decay).to(initial.dtype))
    states, final = _states(chunks, k, v, decays, initial)
    since = None if decays is None else decays.since
    output = scores(q, k, decays) @ v + fade(q, since) @ states
    # A custom operation's results may not be its arguments.
    return chunks.join(scale * output), final.clone()


def _states(
    chunks: Chunks, k: Tensor, v: Tensor, decays: Decays | None, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """The state before every chunk, and those at the end."""
    added = fade(k, None if decays is None else decays.until).mT @ v

    def step(n: int, state: Tensor) -> Tensor:
        return fade(state, None if decays is None else decays.whole[:, :, n]) + added[:, :, n]

    return forward_scan(chunks, initial, step)


@_forward.register_fake
@no_type_check
def _(q: Tensor, k: Tensor, v: Tensor, decay: Any, initial: Tensor, cu: Any, scale: float) -> Any:
    return initial.new_empty(v.shape), torch.empty_like(initial)


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
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    chunks = Chunks.of(q.shape[1], CHUNK, cu_seqlens)
    q, k, v, grad = (chunks.split(x).to(initial.dtype) for x in (q, k, v, grad))
    grad = scale * grad
    decays = None if decay is None else Decays.of(chunks.split(decay).to(initial.dtype))
    since, until, whole = (None,) * 3 if decays is None else decays[:3]
    states, _ = _states(chunks, k, v, decays, initial)
    added = fade(q, since).mT @ grad

    def step(n: int, after: Tensor) -> Tensor:
        return fade(after, None if whole is None else whole[:, :, n]) + added[:, :, n]

    grad_after, grad_initial = backward_scan(chunks, grad_final, step)
    r = scores(grad, v, decays)
    dq = fade(grad @ states.mT, since) + r @ k
    dk = r.mT @ q + fade(v @ grad_after.mT, until)
    dv = scores(q, k, decays).mT @ grad + fade(k, until) @ grad_after
    ddecay = q.new_empty(0)
    if whole is not None:
        after = whole * states + fade(k, until).mT @ v
        ddecay = chunks.join(decay_gradient(q, dq, v, dv, after, grad_after))
    return chunks.join(dq), chunks.join(dk), chunks.join(dv), ddecay, grad_initial.clone()


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
    cu_seqlens: Tensor | None,
    scale: float,
) -> Any:
    new = initial.new_empty
    ddecay = new(0) if decay is None else new(decay.shape)
    return new(q.shape), new(k.shape), new(v.shape), ddecay, torch.empty_like(initial)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, scale = inputs
    ctx.save_for_backward(*tensors)
    ctx.scale = scale


def _autograd(ctx: Any, grad: Tensor, grad_final: Tensor) -> Any:
    q, k, v, decay, initial, cu_seqlens = ctx.saved_tensors
    dq, dk, dv, ddecay, dinitial = _backward(
        grad, grad_final, q, k, v, decay, initial, cu_seqlens, ctx.scale
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
    output, final = _forward(q, k, v, decay, initial, cu_seqlens, scale)
    return output, final


def everything(
    q: Tensor, k: Tensor, v: Tensor, initial: Tensor, scale: float, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The non-causal form: every token sees all tokens of its sequence."""
    if cu_seqlens is None:
        q, k, v = (x.to(initial.dtype) for x in (q, k, v))
        state = initial + torch.einsum("bthk,bthv->bhkv", k, v)
        return scale * torch.einsum("bthk,bhkv->bthv", q, state), state
    chunks = Chunks.of(q.shape[1], CHUNK, cu_seqlens)
    assert chunks.packing is not None
    owner = chunks.packing.sequence
    q, k, v = (chunks.split(x).to(initial.dtype)[0] for x in (q, k, v))  # [H, N, C, …]
    state = initial.index_add(0, owner, (k.mT @ v).movedim(1, 0))
    output = scale * (q @ state[owner].movedim(0, 1))
    return chunks.join(output[None]), state
