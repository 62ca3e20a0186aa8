"""The delta rule: what is asked, and which implementation answers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rankone.ops.arguments import check_call, state_dtype
from rankone.ops.dispatch import choose, walks
from rankone.ops.packed import each_sequence


class DeltaRule(NamedTuple):
    """What `delta_rule` returns; unpacks as (o, state)."""

    output: Float[Tensor, "B T H V"]
    final_state: Float[Tensor, "N H K V"] | None


def delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"],
    *,
    decay: Float[Tensor, "B T H"] | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    impl: str = "auto",
) -> DeltaRule:
    """Fast weights that are corrected: every token replaces what the state holds for its key.

        S_t = e^decay_t (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ      o_t = scale · S_tᵀ q_t

    One step of gradient descent at rate beta_t on ½ ‖S_tᵀ k_t - v_t‖², after the state has faded.
    The state stays bounded while beta ‖k‖² is at most 2: keys are usually of length 1.

    Args:
        decay: in log space, at most 0; one number a token and head (gated DeltaNet).
        scale: K^-0.5 by default.
        initial_state: [N, H, K, V] in float32 (float64 for float64); zeros by default. N is B, or
            the number of packed sequences.
        cu_seqlens: [N+1] offsets of sequences packed into one row (B = 1).
        impl: auto, reference, chunked or triton; a named one never falls back.

    The output has the dtype of q. Gradients go through everything but cu_seqlens. Cost: time
    O(T (C + K) (C + V)), memory O(T (C + K + V) + T K V / C) with chunks of C = 64 tokens.

    Example: the second token has the same key and replaces the first one's value.
        >>> q = k = torch.ones(1, 2, 1, 1)
        >>> v, beta = torch.tensor([5.0, 7.0]).view(1, 2, 1, 1), torch.ones(1, 2, 1)
        >>> delta_rule(q, k, v, beta, scale=1.0).output.flatten()
        tensor([5., 7.])

    Schlag et al. 2021, equations 22 to 25; Yang et al. 2024 (chunks); with decay: Yang et al. 2025.
    """
    scalars = {"beta": beta, "decay": decay}
    sizes = check_call(q, k, v, scalars, {"kv": initial_state}, cu_seqlens)
    name, _ = choose(impl, q.device, dtype=q.dtype, keys=sizes.keys)
    scale = sizes.keys**-0.5 if scale is None else float(scale)
    call = (q, k, v, beta, decay)
    if name == "triton":
        from rankone.ops.delta_rule import triton

        output, final = triton.forward(
            *call, initial_state, scale, cu_seqlens, last=output_final_state
        )
        return DeltaRule(output, final if output_final_state else None)
    if name == "chunked" and walks(q.device):
        from rankone.ops import walk

        output, final = walk.forward(
            walk.Call(*call, scale), initial_state, cu_seqlens, last=output_final_state
        )
        return DeltaRule(output.to(q.dtype), final if output_final_state else None)
    if initial_state is None:
        shape = sizes.states, sizes.heads, sizes.keys, sizes.values
        initial_state = torch.zeros(shape, dtype=state_dtype(q.dtype), device=q.device)
    if name == "chunked":
        from rankone.ops.delta_rule import chunked

        output, final = chunked.forward(*call, initial_state, scale, cu_seqlens)
    else:
        from rankone.ops.delta_rule.reference import forward

        if cu_seqlens is None:
            output, final = forward(*call, initial_state, scale)
        else:
            output, final = each_sequence(forward, call, initial_state, scale, cu_seqlens.tolist())
    return DeltaRule(output.to(q.dtype), final if output_final_state else None)


def delta_rule_step(
    q: Float[Tensor, "B H K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B H V"],
    beta: Float[Tensor, "B H"],
    state: Float[Tensor, "B H K V"] | None = None,
    *,
    decay: Float[Tensor, "B H"] | None = None,
    scale: float | None = None,
) -> DeltaRule:
    """One token of `delta_rule`, for streaming: the output [B, H, V] and the new state."""
    output, state = delta_rule(
        *(x[:, None] for x in (q, k, v, beta)),
        decay=None if decay is None else decay[:, None],
        scale=scale,
        initial_state=state,
        output_final_state=True,
        impl="reference",  # one token is its definition
    )
    return DeltaRule(output[:, 0], state)
