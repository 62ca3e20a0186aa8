# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
"""What a piece of a sequence does to the state before it: kernels for few sequences.

The state after a piece is linear in the one before it, S' = Φ S + A. `transfer_kernel` walks a
piece twice at once: from zeros with its values, which ends with A, and from the identity without
values, which ends with Φ; columns of both are walked by programs of their own. `combine_kernel`
goes over the pieces of a sequence and makes of these the states before each, so that the pieces can
then be walked side by side. The gradient of the state goes back by the same matrices,
Z = Φᵀ Z' + B, where B is what a piece adds to it; the forward keeps Φ.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from rankone.ops.delta_rule.kernels import state_at
from rankone.ops.tiles import (
    dot,
    load_fade,
    load_rows,
    load_scalars,
    piece,
    power,
    slot,
)

_VARYING = ["T", "each", "length", "slots"]  # no recompilation for their values


@triton.jit(do_not_specialize=_VARYING)
@no_type_check
def transfer_kernel(
    k_ptr, v_ptr, beta_ptr, fade_ptr, solve_ptr, added_ptr, turned_ptr, slots_ptr,
    bounds_ptr, T, each, length, slots,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, NK: tl.constexpr,
    STEP: tl.constexpr, DECAY: tl.constexpr,
    DT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Columns of A [K, V] or of Φ [K, K] of a piece, in float32."""
    pid = tl.program_id(0).to(tl.int64)
    part = (pid % (NV + NK)).to(tl.int32)
    of_values = part < NV
    first = tl.where(of_values, part, part - NV) * BV
    h = (pid // (NV + NK)) % H
    r = pid // ((NV + NK) * H)
    begin, n = piece(r, bounds_ptr, T, each, length, STEP)
    row = begin * H + h
    k_ptr += row * K
    v_ptr += row * V
    beta_ptr += row
    solve_ptr += row * C
    if DECAY:
        fade_ptr += (slot(r, slots_ptr, slots, each, length, C, STEP) * H + h) * C
    i = tl.arange(0, BK)[:, None]
    j = first + tl.arange(0, BV)[None, :]
    S = tl.where((i == j) & (part >= NV), 1.0, 0.0)
    for t in tl.range(0, n, C, num_stages=STAGES):
        left = n - t
        k = load_rows(k_ptr, left, H * K, 0, K, C, BK)
        v = load_rows(v_ptr, tl.where(of_values, left, 0), H * V, first, V, C, BV)
        solve = load_rows(solve_ptr, left, H * C, 0, C, C, C)
        beta = load_scalars(beta_ptr, left, H, C)
        held = dot(k, S, None, DT, PRECISION)
        if DECAY:
            c, whole = load_fade(fade_ptr, C)
            fade_ptr += C * H
            held = held * power(c)[:, None]
        x = v.to(tl.float32) - held
        u = dot(solve, x, x, DT, PRECISION) * beta[:, None]
        if DECAY:
            u = u * power(whole - c)[:, None]
            S = S * power(whole)
        S = dot(tl.trans(k), u, S, DT, PRECISION)
        k_ptr += C * H * K
        v_ptr += C * H * V
        beta_ptr += C * H
        solve_ptr += C * H * C
    if of_values:
        where, inside = state_at(added_ptr + (r * H + h) * (K * V), first, K, V, BK, BV)
        tl.store(where, S, mask=inside)
    else:
        where, inside = state_at(turned_ptr + (r * H + h) * (K * K), first, K, K, BK, BV)
        tl.store(where, S, mask=inside)


@triton.jit(do_not_specialize=["each"])
@no_type_check
def combine_kernel(
    added_ptr, turned_ptr, start_ptr, end_ptr, first_ptr, each,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """What pieces add becomes the states before them (BACKWARD: the gradients after them), in
    place, for columns of the values of one sequence and head."""
    pid = tl.program_id(0).to(tl.int64)
    first = ((pid % NV) * BV).to(tl.int32)
    h = (pid // NV) % H
    b = pid // (NV * H)
    begin = b * each
    n = each
    if PACKED:
        begin = tl.load(first_ptr + b).to(tl.int64)
        n = (tl.load(first_ptr + b + 1) - begin).to(tl.int32)
    S = tl.zeros([BK, BV], tl.float32)
    if INITIAL:
        where, inside = state_at(start_ptr + (b * H + h) * (K * V), first, K, V, BK, BV)
        S = tl.load(where, mask=inside, other=0.0)
    at = begin * H + h
    if BACKWARD:
        at = (begin + n - 1) * H + h
    for _ in tl.range(0, n, num_stages=1):
        where, inside = state_at(added_ptr + at * (K * V), first, K, V, BK, BV)
        A = tl.load(where, mask=inside, other=0.0)
        tl.store(where, S, mask=inside)
        by, there = state_at(turned_ptr + at * (K * K), 0, K, K, BK, BK)
        turned = tl.load(by, mask=there, other=0.0)
        if BACKWARD:
            turned = tl.trans(turned)
            at -= H
        else:
            at += H
        S = tl.dot(turned, S, A, input_precision="tf32x3")
    if FINAL:
        where, inside = state_at(end_ptr + (b * H + h) * (K * V), first, K, V, BK, BV)
        tl.store(where, S, mask=inside)
