"""Linear attention: what is asked, and which implementation answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rankone.ops.arguments import check_call, state_dtype
from rankone.ops.dispatch import choose, walks
from rankone.ops.packed import each_sequence

EPSILON = 1e-6
"""Added to the normaliser (Katharopoulos et al. 2020)."""


class NormalizedState(NamedTuple):
    """The state with a normaliser: sums of k vᵀ and of k."""

    kv: Float[Tensor, "N H K V"]
    z: Float[Tensor, "N H K"]


class LinearAttention(NamedTuple):
    """What `linear_attention` returns; unpacks as (o, state)."""

    output: Float[Tensor, "B T H V"]
    final_state: Float[Tensor, "N H K V"] | NormalizedState | None


def linear_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    *,
    decay: Float[Tensor, "B T H"] | None = None,
    scale: float | None = None,
    normalize: bool = False,
    causal: bool = True,
    initial_state: Float[Tensor, "N H K V"] | tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    impl: str = "auto",
) -> LinearAttention:
    """Attention without softmax, at a cost linear in T.

        S_t = e^decay_t S_{t-1} + k_t v_tᵀ        o_t = scale · S_tᵀ q_t

    With `normalize` a second state z_t = e^decay_t z_{t-1} + k_t is kept and o_t is divided by
    scale · z_t·q_t + 1e-6: the Linear Transformer, if q and k are non-negative features. With
    `causal=False` every token sees the last state.

    Args:
        decay: in log space, at most 0; one number a token and head. Causal only.
        scale: K^-0.5 by default.
        initial_state: [N, H, K, V] in float32 (float64 for float64), with `normalize` a pair
            (kv, z); zeros by default. N is B, or the number of packed sequences.
        cu_seqlens: [N+1] offsets of sequences packed into one row (B = 1).
        impl: auto, reference, chunked or triton; a named one never falls back.

    The output has the dtype of q. Gradients go through everything but cu_seqlens. Cost: time
    O(T (C + K) V), memory O(T (K + V) + T K V / C) with chunks of C = 64 tokens.

    Example:
        >>> q = k = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)
        >>> v = torch.ones(1, 3, 1, 1)
        >>> linear_attention(q, k, v, scale=1.0).output.flatten()
        tensor([ 1.,  6., 18.])
        >>> linear_attention(q, k, v, causal=False, normalize=True).output.flatten()
        tensor([1.0000, 1.0000, 1.0000])

    Katharopoulos et al. 2020, equations 10 to 12; with decay: Sun et al. 2023 (RetNet).
    """
    if decay is not None and not causal:
        raise ValueError("decay says how the past fades: it needs causal=True")
    kv, z = _parts(initial_state, normalize)
    state = {"kv": kv, "z": z}
    sizes = check_call(q, k, v, {"decay": decay}, state, cu_seqlens)
    name, _ = choose(impl, q.device, dtype=q.dtype, keys=sizes.keys)
    scale = sizes.keys**-0.5 if scale is None else float(scale)
    options: dict[str, Any] = {
        "decay": decay,
        "scale": scale,
        "causal": causal,
        "cu_seqlens": cu_seqlens,
    }
    compute: Compute
    if name == "triton":
        compute = partial(_fused, last=output_final_state, wide=normalize, **options)
    else:
        options |= {"last": output_final_state}
        compute = partial(_unfused, name, states=sizes.states, **options)
    if not normalize:
        output, final = compute(q, k, v, kv)
        return LinearAttention(output.to(q.dtype), final if output_final_state else None)
    # A tile of the kernels has room for one more value unless the values fill it.
    together = name != "triton" or sizes.values % 16 != 0
    output, last = _normalized(compute, q, k, v, kv, z, together=together)
    return LinearAttention(output.to(q.dtype), last if output_final_state else None)


def linear_attention_step(
    q: Float[Tensor, "B H K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B H V"],
    state: Float[Tensor, "B H K V"] | tuple[Tensor, Tensor] | None = None,
    *,
    decay: Float[Tensor, "B H"] | None = None,
    scale: float | None = None,
    normalize: bool = False,
) -> LinearAttention:
    """One token of `linear_attention`, for streaming: the output [B, H, V] and the new state."""
    output, state = linear_attention(
        *(x[:, None] for x in (q, k, v)),
        decay=None if decay is None else decay[:, None],
        scale=scale,
        normalize=normalize,
        initial_state=state,
        output_final_state=True,
        impl="reference",  # one token is its definition
    )
    return LinearAttention(output[:, 0], state)


def _parts(
    state: Tensor | tuple[Tensor, Tensor] | None, normalize: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The initial state as kv and z."""
    if state is None:
        return None, None
    if normalize != isinstance(state, tuple):
        expected = "a pair (kv, z)" if normalize else "one tensor [N, H, K, V]"
        raise ValueError(
            f"initial_state must be {expected} with normalize={normalize}, "
            f"got {type(state).__name__}"
        )
    return (state[0], state[1]) if isinstance(state, tuple) else (state, None)


Compute = Callable[..., tuple[Tensor, Tensor]]
"""q, k, v and the initial state, or None → outputs and last states."""


def _normalized(
    compute: Compute,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor | None,
    z: Tensor | None,
    *,
    together: bool,
) -> tuple[Tensor, NormalizedState]:
    """Outputs over their normalisers. The normaliser is one more value, 1 for every token, which
    may be computed together with the others."""
    ones = torch.ones_like(v[..., :1])
    z = None if z is None else z[..., None]
    if together:
        state = None if kv is None or z is None else torch.cat([kv, z], dim=-1)
        output, final = compute(q, k, torch.cat([v, ones], dim=-1), state)
        output, sums = output[..., :-1], output[..., -1:]
        final, final_z = final[..., :-1], final[..., -1:]
    else:
        output, final = compute(q, k, v, kv)
        sums, final_z = compute(q, k, ones, z)
    last = NormalizedState(final, final_z[..., 0] if final_z.dim() == 4 else final_z)
    return output / (sums + EPSILON), last


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    *,
    decay: Tensor | None,
    scale: float,
    causal: bool,
    cu_seqlens: Tensor | None,
    last: bool,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """By the kernels; `wide` outputs are in float32, others in the dtype of q."""
    from rankone.ops.linear_attention import triton

    return triton.forward(
        q, k, v, decay, state, scale, cu_seqlens, causal=causal, last=last, wide=wide
    )


def _unfused(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    *,
    decay: Tensor | None,
    scale: float,
    causal: bool,
    cu_seqlens: Tensor | None,
    states: int,
    last: bool,
) -> tuple[Tensor, Tensor]:
    """In chunks or by the definition: outputs and, at least if `last`, last states in the state's
    dtype."""
    if name == "chunked" and causal and walks(q.device):
        from rankone.ops import walk

        return walk.forward(walk.Call(q, k, v, None, decay, scale), state, cu_seqlens, last=last)
    if state is None:
        shape = states, q.shape[2], q.shape[3], v.shape[3]
        state = torch.zeros(shape, dtype=state_dtype(q.dtype), device=q.device)
    if name == "chunked":
        from rankone.ops.linear_attention import chunked

        if causal:
            return chunked.forward(q, k, v, decay, state, scale, cu_seqlens)
        return chunked.everything(q, k, v, state, scale, cu_seqlens)
    from rankone.ops.linear_attention import reference

    offsets = None if cu_seqlens is None else cu_seqlens.tolist()
    if offsets is None:
        output, final = reference.forward(q, k, v, decay, state, scale)
    else:
        call = (q, k, v, decay)
        output, final = each_sequence(reference.forward, call, state, scale, offsets)
    if causal:
        return output, final
    owner = torch.arange(q.shape[0], device=q.device)[:, None].expand(q.shape[:2])
    if offsets is not None:
        lengths = torch.tensor(offsets, device=q.device).diff()
        owner = torch.arange(len(lengths), device=q.device).repeat_interleave(lengths)[None]
    return scale * torch.einsum("bthk,bthkv->bthv", q.to(final.dtype), final[owner]), final
