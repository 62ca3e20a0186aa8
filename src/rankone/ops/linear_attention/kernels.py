# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
"""Linear attention in fused GPU kernels: states stay on the chip, chunks are walked.

Equations and letters are those of `chunked`. One kernel, `scan_kernel`, walks a piece of a
sequence with the state [K, V] (or some of its columns) in registers:

    O = (e^c Q) S + P V,    P = Q Kᵀ ∘ D,    S ← e^c_C S + Kᵀ (e^(c_C - c) V)

It is the forward pass, and the gradients too, which are the same recurrence in other letters: dQ is
the output for queries dO, keys V, values K, with the state Sᵀ; dK is that for queries V, keys dO,
values Q, walked from the end with the gradient Zᵀ of the state, and dV that for queries K, keys Q,
values dO with Z.

Where there are too few sequences and heads to fill the device, sequences are cut into pieces:
`sum_kernel` sums what every piece adds to the state, `prefix_kernel` turns these sums into the
states before each piece, and the pieces are walked side by side.

**Gradient of decay.** Let E be <S, Z> behind a chunk. For token t of the chunk

    ddecay_t = E + Σ_(i≥t) (q_i·dq_i - k_i·dk_i)

in which pairs of tokens that are both behind t cancel. They do so to the last bits, since both
walks round the same products dO_i·v_j. Over a whole sequence the sum loses its digits, so E is
computed from both states every `EXACT` tokens, and for the chunks in between from what their tokens
read of the state before them, X, and leave to the state behind them, Y: it is E - X + Y for the
next chunk. What is missing at the next exact place is spread evenly over the chunks. The walk for
dQ leaves q·dq, X, and S at the exact places, that for dK leaves k·dk, Y and E.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from rankone.ops.tiles import (
    between,
    dot,
    load_fade,
    load_rows,
    load_state,
    piece,
    power,
    slot,
    store_rows,
    store_state,
)

_VARYING = [
    "T",
    "each",
    "length",
    "slots",
    "kept_slots",
    "scale",
    "unit",
    "total_tokens",
]  # no recompilation for their values


@triton.jit(do_not_specialize=_VARYING)
@no_type_check
def scan_kernel(
    q_ptr, k_ptr, v_ptr, fade_ptr, initial_ptr, final_ptr, out_ptr,
    other_ptr, share_ptr, through_ptr, kept_ptr, product_ptr, kept_slots_ptr, kept_slots,
    bounds_ptr, T, each, length, slots_ptr, slots, scale, unit, total_tokens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr,
    STEP: tl.constexpr, DECAY: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    CAUSAL: tl.constexpr, BACKWARD: tl.constexpr, SHARES: tl.constexpr, EVERY: tl.constexpr,
    DT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs of a piece, from the state at its beginning, for columns of the values.

    BACKWARD it walks from the end, and the state is that after the piece. The state in memory is
    `unit` times the one here. With SHARES, `share` gets the product of output and `other` for all
    tokens, and `through` the sum over a chunk of the part of it that comes from the state; forward,
    `kept` gets the state before every EVERY-th chunk, and BACKWARD, `product` gets <S, Z> with that
    state.
    """
    pid = tl.program_id(0).to(tl.int64)
    part = pid % NV
    first = (part * BV).to(tl.int32)
    h = (pid // NV) % H
    r = pid // (NV * H)
    begin, n = piece(r, bounds_ptr, T, each, length, STEP)
    chunks = tl.cdiv(n, C)
    last = tl.maximum(chunks - 1, 0).to(tl.int64)
    row = begin * H + h  # of the first chunk's first token
    if BACKWARD:
        row += last * (C * H)
    q_ptr += row * K
    k_ptr += row * K
    v_ptr += row * V
    out_ptr += row * V
    at = (r * H + h) * (K * V)
    S = tl.zeros([BV, BK], tl.float32)  # transposed
    if INITIAL:
        if not CAUSAL:  # all pieces of a sequence have its state
            at = (r // each * H + h) * (K * V)
        S = load_state(initial_ptr + at, first, K, V, SK, SV, BK, BV) / unit
    if SHARES:
        other_ptr += row * V
        share_ptr += part * total_tokens * H + row
        chunk = slot(r, slots_ptr, slots, each, length, C, STEP)
        if BACKWARD:
            chunk += last
        through_ptr += (chunk * H + h) * NV + part
        kept = slot(r, kept_slots_ptr, kept_slots, each, length, EVERY * C, STEP)
        if BACKWARD:
            kept += last // EVERY
        kept_ptr += (kept * H + h) * (K * V)
        product_ptr += (kept * H + h) * NV + part

    if DECAY:
        fade_ptr += (slot(r, slots_ptr, slots, each, length, C, STEP) * H + h) * C
        if BACKWARD:
            fade_ptr += last * (H * C)
    i = tl.arange(0, C)
    NEXT: tl.constexpr = -1 if BACKWARD else 1
    STRIDE: tl.constexpr = NEXT * C * H
    for m in tl.range(0, chunks, num_stages=STAGES):
        t = m * C
        if BACKWARD:
            t = (chunks - 1 - m) * C
        left = n - t
        q = load_rows(q_ptr, left, H * K, 0, K, C, BK)
        if CAUSAL:
            k = load_rows(k_ptr, left, H * K, 0, K, C, BK)
            v = load_rows(v_ptr, left, H * V, first, V, C, BV)
            P = dot(q, tl.trans(k), None, DT, PRECISION)
        o = dot(q, tl.trans(S), None, DT, PRECISION)
        if DECAY:
            c, whole = load_fade(fade_ptr, C)
            fade_ptr += STRIDE
            since = power(c)
            until = power(whole - c)
            if BACKWARD:
                since, until = until, since
            o = o * since[:, None]
        if SHARES:
            w = load_rows(other_ptr, left, H * V, first, V, C, BV)
            tl.store(through_ptr, tl.sum(o * w.to(tl.float32)) * scale)
            if not BACKWARD:  # noqa: SIM102 - decided when it is compiled, unlike the next
                if t % (EVERY * C) == 0:
                    store_state(kept_ptr, S, first, K, V, SK, SV, BK, BV)
                    kept_ptr += H * K * V
        if CAUSAL:
            if DECAY:
                P = P * between(c, C, BACKWARD)
            elif BACKWARD:
                P = tl.where(i[:, None] <= i[None, :], P, 0.0)
            else:
                P = tl.where(i[:, None] >= i[None, :], P, 0.0)
            o = dot(P, v, o, DT, PRECISION)
            v = tl.trans(v)
            if DECAY:
                v = v.to(tl.float32) * until[None, :]
                S = S * power(whole)
            S = dot(v, k, S, DT, PRECISION)
            k_ptr += STRIDE * K
            v_ptr += STRIDE * V
        if SHARES:
            if BACKWARD:  # noqa: SIM102
                if t % (EVERY * C) == 0:
                    before = load_state(kept_ptr, first, K, V, SK, SV, BK, BV)
                    tl.store(product_ptr, tl.sum(before * S) * unit)
                    kept_ptr -= H * K * V
                    product_ptr -= H * NV
            w = load_rows(other_ptr, left, H * V, first, V, C, BV)
            tl.store(share_ptr + i * H, tl.sum(o * w.to(tl.float32), 1) * scale, mask=i < left)
            other_ptr += STRIDE * V
            share_ptr += STRIDE
            through_ptr += NEXT * H * NV
        store_rows(out_ptr, o * scale, left, H * V, first, V, C, BV)
        q_ptr += STRIDE * K
        out_ptr += STRIDE * V

    if FINAL:
        store_state(final_ptr + at, S * unit, first, K, V, SK, SV, BK, BV)


@triton.jit(do_not_specialize=_VARYING)
@no_type_check
def sum_kernel(
    k_ptr, v_ptr, fade_ptr, sum_ptr, whole_ptr,
    bounds_ptr, T, each, length, slots_ptr, slots, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr,
    STEP: tl.constexpr, DECAY: tl.constexpr, BACKWARD: tl.constexpr,
    DT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a piece adds to the state after it; BACKWARD: to the gradient of the state before it,
    with k = q and v = dO."""
    pid = tl.program_id(0).to(tl.int64)
    first = ((pid % NV) * BV).to(tl.int32)
    h = (pid // NV) % H
    r = pid // (NV * H)
    begin, n = piece(r, bounds_ptr, T, each, length, STEP)
    k_ptr += (begin * H + h) * K
    v_ptr += (begin * H + h) * V
    S = tl.zeros([BV, BK], tl.float32)  # transposed
    faded = 0.0
    if DECAY:
        fade_ptr += (slot(r, slots_ptr, slots, each, length, C, STEP) * H + h) * C
    for t in tl.range(0, n, C, num_stages=STAGES):
        left = n - t
        k = load_rows(k_ptr, left, H * K, 0, K, C, BK)
        v = tl.trans(load_rows(v_ptr, left, H * V, first, V, C, BV))
        if DECAY:
            c, whole = load_fade(fade_ptr, C)
            fade_ptr += C * H
            if BACKWARD:  # token by token further from the state before the piece
                v = v.to(tl.float32) * power(faded + c)[None, :]
            else:
                v = v.to(tl.float32) * power(whole - c)[None, :]
                S = S * power(whole)
            faded += whole
        S = dot(v, k, S, DT, PRECISION)
        k_ptr += C * H * K
        v_ptr += C * H * V
    store_state(sum_ptr + (r * H + h) * (K * V), S * scale, first, K, V, V, 1, BK, BV)
    if DECAY and first == 0:
        tl.store(whole_ptr + r * H + h, faded)


@triton.jit(do_not_specialize=["each"])
@no_type_check
def prefix_kernel(
    sum_ptr, whole_ptr, initial_ptr, final_ptr, first_ptr, each,
    H: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    PACKED: tl.constexpr, DECAY: tl.constexpr, INITIAL: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Sums of pieces become the states before them (BACKWARD: the gradients after them), in place,
    for one sequence, one head and some of the N numbers of a state."""
    pid = tl.program_id(0).to(tl.int64)
    j = (pid % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    h = (pid // BLOCKS) % H
    b = pid // (BLOCKS * H)
    begin = b * each
    n = each
    if PACKED:
        begin = tl.load(first_ptr + b).to(tl.int64)
        n = (tl.load(first_ptr + b + 1) - begin).to(tl.int32)
    inside = j < N
    S = tl.zeros([BLOCK], tl.float32)
    if INITIAL:
        S = tl.load(initial_ptr + (b * H + h) * N + j, mask=inside, other=0.0)
    step = H
    at = begin * H + h
    if BACKWARD:
        step = -H
        at = (begin + n - 1) * H + h
    for _ in tl.range(0, n):
        added = tl.load(sum_ptr + at * N + j, mask=inside, other=0.0)
        tl.store(sum_ptr + at * N + j, S, mask=inside)
        if DECAY:
            S = S * power(tl.load(whole_ptr + at))
        S += added
        at += step
    tl.store(final_ptr + (b * H + h) * N + j, S, mask=inside)


@triton.jit
@no_type_check
def _partial_sum(ptr, at, inside, total_tokens, H: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """One number a token, of which N programs have each computed a part."""
    total = tl.zeros([C], tl.float32)
    for p in range(N):
        total += tl.load(ptr + p * total_tokens * H + at, mask=inside, other=0.0)
    return total


@triton.jit(do_not_specialize=_VARYING)
@no_type_check
def decay_kernel(
    fade_ptr, of_q_ptr, of_k_ptr, read_ptr, left_ptr, product_ptr, out_ptr,
    bounds_ptr, T, each, length, slots_ptr, slots, total_tokens,
    H: tl.constexpr, C: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The gradient of decay in a piece of EXACT tokens, from q·dq and k·dk of its tokens, X and Y
    of its chunks, and <S, Z> before the piece and before the next one; all of them in N parts."""
    pid = tl.program_id(0).to(tl.int64)
    h = pid % H
    r = pid // H
    begin, n = piece(r, bounds_ptr, T, each, length, STEP)
    if n > 0:
        i = tl.arange(0, C)
        chunk = slot(r, slots_ptr, slots, each, length, C, STEP) * H + h
        fade_ptr += chunk * C + C - 1
        read_ptr += chunk * N
        left_ptr += chunk * N
        start = _sum(product_ptr + (r * H + h) * N, N)
        goes_on = (r + 1) % each != 0
        if STEP > 0:
            goes_on = tl.load(bounds_ptr + r * STEP + 2) != 0
        # From the beginning to the end of the piece, to see how far the sums go astray.
        e = start
        known = 0  # the last chunk before which <S, Z> is known
        for t in range(0, n, C):
            m = t // C * H
            # What is below the resolution of the sums is not left to their errors.
            forgotten = tl.load(fade_ptr + m * C) < LIMIT
            known = tl.where(forgotten, t + C, known)
            e = tl.where(forgotten, 0.0, e - _sum(read_ptr + m * N, N)) + _sum(left_ptr + m * N, N)
        astray = 0.0
        if goes_on:
            astray = _sum(product_ptr + (r * H + H + h) * N, N) - e
        slope = tl.where(known < n, astray / tl.maximum(n - known, 1).to(tl.float32), 0.0)
        e = start
        for t in range(0, n, C):
            at = (begin + t + i) * H + h
            inside = t + i < n
            m = t // C * H
            forgotten = tl.load(fade_ptr + m * C) < LIMIT
            e = tl.where(forgotten, 0.0, e - _sum(read_ptr + m * N, N)) + _sum(left_ptr + m * N, N)
            bent = tl.maximum(t + C // 2 - known, 0).to(tl.float32) * slope
            given = _partial_sum(of_q_ptr, at, inside, total_tokens, H, N, C)
            taken = _partial_sum(of_k_ptr, at, inside, total_tokens, H, N, C)
            found = tl.cumsum(given - taken, 0, reverse=True) + (e + bent)
            tl.store(out_ptr + at, found, mask=inside)


@triton.jit
@no_type_check
def _sum(ptr, N: tl.constexpr):
    """The sum of N numbers that lie together."""
    total = 0.0
    for p in range(N):
        total += tl.load(ptr + p)
    return total
