# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
"""The delta rule in fused GPU kernels: one solves the chunks, one walks them.

With the letters of `chunked`, and R = U / beta in place of what is written, so that a beta of 0
needs no care: R = T (V - e^c K S), where T is the inverse of I + (K Kᵀ ∘ D) beta below the diagonal
and has nothing to do with the state. `solve_kernel` computes T for all chunks side by side; its
blocks of 16 by elimination in float32, the rest by products of blocks. `scan_kernel` walks a
sequence with some columns of the state on the chip:

    X = V - e^c K S,   U = beta T X,   O = e^c Q S + P U,   S ← e^c_C S + Kᵀ (e^(c_C - c) U)

The backward computes R and the states before all chunks again, piece by piece from states that the
forward kept every `EXACT` tokens; then `reverse_kernel` walks back with the gradient Z of the
state, which leaves dV and the Z after all chunks,

    dU = Pᵀ dO + e^(c_C - c) K Z,   dV = dX = Tᵀ (beta dU)
    Z ← e^c_C Z + Qᵀ (e^c dO) - Kᵀ (e^c dX)

and `local_kernel` makes the other gradients from these, all chunks side by side. With A = dO Rᵀ and
N = dX Rᵀ:

    dQ = e^c dO Sᵀ + (A ∘ D beta) K
    dK = (A ∘ D beta)ᵀ Q + e^(c_C - c) beta R Zᵀ - e^c dX Sᵀ + (M + Mᵀ) K,   M = -N ∘ D beta
    dbeta_j = Σ_i P_ij A_ij - Σ_(i>j) (K Kᵀ ∘ D)_ij N_ij + e^(c_C - c_j) k_j·(Z r_j)

The gradient of decay at token t of a chunk is the sum of all that crosses its beginning: pairs
i ≥ t > j of tokens, what i ≥ t read from the state before the chunk, what j < t left to the state
after it, and what of the one stays in the other.
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
    load_scalars,
    piece,
    power,
    product_of_states,
    rounded,
    slot,
    store_rows,
)

_VARYING = [
    "T",
    "each",
    "length",
    "scale",
    "slots",
    "check_slots",
]  # no recompilation for their values


@triton.jit
@no_type_check
def state_at(ptr, first, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Addresses and mask of columns `first` … of a state [K, V]."""
    i = tl.arange(0, BK)[:, None]
    j = first + tl.arange(0, BV)[None, :]
    return ptr + i * V + j, (i < K) & (j < V)


@triton.jit
@no_type_check
def _blocks_inverse(A, C: tl.constexpr):
    """Inverses of I + A of the blocks of 16 on the diagonal of A [C, C], which is 0 on and above
    its diagonal; [C, C] with zeros elsewhere."""
    N: tl.constexpr = C // 16
    same = (tl.arange(0, N)[:, None] == tl.arange(0, N)[None, :])[:, None, :, None]
    A = tl.sum(tl.where(same, tl.reshape(A, [N, 16, N, 16]), 0.0), 2)
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    X = tl.where(row == column, 1.0, 0.0) + tl.zeros([N, 16, 16], tl.float32)
    for j in range(15):  # column j of A takes row j of X away from the rows below
        left = tl.sum(tl.where(column == j, A, 0.0), 2)
        right = tl.sum(tl.where(row == j, X, 0.0), 1)
        X -= left[:, :, None] * right[:, None, :]
    return tl.reshape(tl.where(same, X[:, :, None, :], 0.0), [C, C])


@triton.jit(do_not_specialize=_VARYING)
@no_type_check
def solve_kernel(
    k_ptr, beta_ptr, fade_ptr, solve_ptr, bounds_ptr, T, each, length,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, STEP: tl.constexpr,
    DECAY: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """T - I of one chunk: without the diagonal of ones, the rest can be rounded."""
    pid = tl.program_id(0).to(tl.int64)
    h = pid % H
    begin, n = piece(pid // H, bounds_ptr, T, each, length, STEP)
    if n > 0:
        row = begin * H + h
        i = tl.arange(0, C)
        k = load_rows(k_ptr + row * K, n, H * K, 0, K, C, BK)
        beta = load_scalars(beta_ptr + row, n, H, C)
        A = dot(k, tl.trans(k), None, DT, PRECISION) * beta[None, :]
        if DECAY:
            c, _ = load_fade(fade_ptr + pid * C, C)
            A = A * between(c, C, False)
        A = tl.where(i[:, None] > i[None, :], A, 0.0)
        X = _blocks_inverse(A, C)
        for level in tl.static_range(C // 32):
            size = 16 << level
            within = i // (2 * size)
            half = i // size
            beside = (within[:, None] == within[None, :]) & (half[:, None] != half[None, :])
            off = dot(tl.where(beside, A, 0.0), X, None, tl.float32, PRECISION)
            X -= dot(X, off, None, tl.float32, PRECISION)
        X = tl.where(i[:, None] > i[None, :], rounded(X, solve_ptr.dtype.element_ty), 0.0)
        store_rows(solve_ptr + row * C, X, n, H * C, 0, C, C, C)


@triton.jit(do_not_specialize=_VARYING)
@no_type_check
def scan_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, fade_ptr, solve_ptr, initial_ptr, final_ptr, out_ptr,
    right_ptr, kept_ptr, slots_ptr, check_ptr, check_slots_ptr,
    bounds_ptr, T, each, length, scale, slots, check_slots,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr,
    STEP: tl.constexpr, DECAY: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    OUT: tl.constexpr, CHECK: tl.constexpr, EVERY: tl.constexpr, SPLIT: tl.constexpr,
    DT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs of a piece for columns of the values; without OUT: R, and the states before chunks.
    With CHECK also the state before every EVERY-th chunk, in float32. With SPLIT what is written
    into the state is not rounded: sums of few products need it."""
    pid = tl.program_id(0).to(tl.int64)
    first = ((pid % NV) * BV).to(tl.int32)
    h = (pid // NV) % H
    r = pid // (NV * H)
    begin, n = piece(r, bounds_ptr, T, each, length, STEP)
    i = tl.arange(0, C)
    row = begin * H + h
    k_ptr += row * K
    v_ptr += row * V
    beta_ptr += row
    solve_ptr += row * C
    S = tl.zeros([BK, BV], tl.float32)
    if INITIAL:
        where, inside = state_at(initial_ptr + (r * H + h) * (K * V), first, K, V, BK, BV)
        S = tl.load(where, mask=inside, other=0.0)
    first_slot = slot(r, slots_ptr, slots, each, length, C, STEP)
    if DECAY:
        fade_ptr += (first_slot * H + h) * C
    if OUT:
        q_ptr += row * K
        out_ptr += row * V
    else:
        right_ptr += row * V
        kept_ptr += (first_slot * H + h) * (K * V)
    if CHECK:
        checked = slot(r, check_slots_ptr, check_slots, each, length, EVERY * C, STEP)
        check_ptr += (checked * H + h) * (K * V)

    span = EVERY * C if CHECK else tl.maximum(n, 1)
    for start in range(0, n, span):
        if CHECK:
            kept_at, there = state_at(check_ptr, first, K, V, BK, BV)
            tl.store(kept_at, S, mask=there)
            check_ptr += H * K * V
        for t in tl.range(start, tl.minimum(start + span, n), C, num_stages=STAGES):
            left = n - t
            k = load_rows(k_ptr, left, H * K, 0, K, C, BK)
            v = load_rows(v_ptr, left, H * V, first, V, C, BV)
            solve = load_rows(solve_ptr, left, H * C, 0, C, C, C)
            beta = load_scalars(beta_ptr, left, H, C)
            held = dot(k, S, None, DT, PRECISION)
            if DECAY:
                c, whole = load_fade(fade_ptr, C)
                fade_ptr += C * H
                since = power(c)
                held = held * since[:, None]
            if OUT:
                q = load_rows(q_ptr, left, H * K, 0, K, C, BK)
                o = dot(q, S, None, DT, PRECISION)
                P = dot(q, tl.trans(k), None, DT, PRECISION)
                if DECAY:
                    o = o * since[:, None]
                    P = P * between(c, C, False)
                else:
                    P = tl.where(i[:, None] >= i[None, :], P, 0.0)
            else:
                kept_at, there = state_at(kept_ptr, first, K, V, BK, BV)
                tl.store(kept_at, rounded(S, kept_ptr.dtype.element_ty), mask=there)
                kept_ptr += H * K * V
            x = v.to(tl.float32) - held
            right = dot(solve, x, x, DT, PRECISION)
            u = right * beta[:, None]
            if OUT:
                o = dot(P, u, o, DT, PRECISION)
                store_rows(out_ptr, o * scale, left, H * V, first, V, C, BV)
                q_ptr += C * H * K
                out_ptr += C * H * V
            else:
                store_rows(right_ptr, right, left, H * V, first, V, C, BV)
                right_ptr += C * H * V
            if DECAY:
                u = u * power(whole - c)[:, None]
                S = S * power(whole)
            if SPLIT:
                S = dot(tl.trans(k), u - rounded(u, DT).to(tl.float32), S, DT, PRECISION)
            S = dot(tl.trans(k), u, S, DT, PRECISION)
            k_ptr += C * H * K
            v_ptr += C * H * V
            beta_ptr += C * H
            solve_ptr += C * H * C

    if FINAL:
        where, inside = state_at(final_ptr + (r * H + h) * (K * V), first, K, V, BK, BV)
        tl.store(where, S, mask=inside)


@triton.jit(do_not_specialize=_VARYING)
@no_type_check
def reverse_kernel(
    q_ptr, k_ptr, beta_ptr, fade_ptr, solve_ptr, do_ptr, dfinal_ptr, dinitial_ptr, dv_ptr,
    kept_ptr, slots_ptr, bounds_ptr, T, each, length, scale, slots,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr,
    STEP: tl.constexpr, DECAY: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    OUT: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dV of a piece, and the gradients of the states after its chunks, for columns of them; without
    OUT only that of the state before it."""
    pid = tl.program_id(0).to(tl.int64)
    first = ((pid % NV) * BV).to(tl.int32)
    h = (pid // NV) % H
    r = pid // (NV * H)
    begin, n = piece(r, bounds_ptr, T, each, length, STEP)
    i = tl.arange(0, C)
    chunks = tl.cdiv(n, C)
    last = tl.maximum(chunks - 1, 0).to(tl.int64)
    row = (begin + last * C) * H + h
    q_ptr += row * K
    k_ptr += row * K
    do_ptr += row * V
    beta_ptr += row
    solve_ptr += row * C
    last_slot = slot(r, slots_ptr, slots, each, length, C, STEP) + last
    if OUT:
        dv_ptr += row * V
        kept_ptr += (last_slot * H + h) * (K * V)
    if DECAY:
        fade_ptr += (last_slot * H + h) * C
    Z = tl.zeros([BK, BV], tl.float32)  # without the scale, like dU and dX below
    if INITIAL:
        where, inside = state_at(dfinal_ptr + (r * H + h) * (K * V), first, K, V, BK, BV)
        Z = tl.load(where, mask=inside, other=0.0) / scale

    for m in tl.range(0, chunks, num_stages=STAGES):
        left = n - (chunks - 1 - m) * C
        q = load_rows(q_ptr, left, H * K, 0, K, C, BK)
        k = load_rows(k_ptr, left, H * K, 0, K, C, BK)
        do = load_rows(do_ptr, left, H * V, first, V, C, BV)
        solve = load_rows(solve_ptr, left, H * C, 0, C, C, C)
        beta = load_scalars(beta_ptr, left, H, C)
        if OUT:
            kept_at, there = state_at(kept_ptr, first, K, V, BK, BV)
            tl.store(kept_at, rounded(Z * scale, kept_ptr.dtype.element_ty), mask=there)
            kept_ptr -= H * K * V
        Pt = dot(k, tl.trans(q), None, DT, PRECISION)
        du = dot(k, Z, None, DT, PRECISION)
        if DECAY:
            c, whole = load_fade(fade_ptr, C)
            fade_ptr -= C * H
            since = power(c)
            Pt = Pt * between(c, C, True)
            du = du * power(whole - c)[:, None]
        else:
            Pt = tl.where(i[:, None] <= i[None, :], Pt, 0.0)
        du = dot(Pt, do, du, DT, PRECISION)
        du = du * beta[:, None]
        dx = dot(tl.trans(solve), du, du, DT, PRECISION)
        if OUT:
            store_rows(dv_ptr, dx * scale, left, H * V, first, V, C, BV)
            dv_ptr -= C * H * V
        if DECAY:
            do = do.to(tl.float32) * since[:, None]
            dx = dx * since[:, None]
            Z = Z * power(whole)
        Z = dot(tl.trans(q), do, Z, DT, PRECISION)
        Z = dot(tl.trans(k), -dx, Z, DT, PRECISION)
        q_ptr -= C * H * K
        k_ptr -= C * H * K
        do_ptr -= C * H * V
        beta_ptr -= C * H
        solve_ptr -= C * H * C

    if FINAL:
        where, inside = state_at(dinitial_ptr + (r * H + h) * (K * V), first, K, V, BK, BV)
        tl.store(where, Z * scale, mask=inside)


@triton.jit(do_not_specialize=[*_VARYING, "total_tokens"])
@no_type_check
def local_kernel(
    q_ptr, k_ptr, beta_ptr, fade_ptr, right_ptr, do_ptr, dx_ptr, before_ptr, after_ptr,
    dq_ptr, dk_ptr, dbeta_ptr, dfade_ptr, bounds_ptr, T, each, length, scale, total_tokens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr,
    STEP: tl.constexpr, DECAY: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Columns of dQ and dK in one chunk, and what these columns add to dbeta and to the gradient
    of decay, both of which are linear in q and k."""
    pid = tl.program_id(0).to(tl.int64)
    first = ((pid % NK) * BK).to(tl.int32)
    h = (pid // NK) % H
    r = pid // (NK * H)
    begin, n = piece(r, bounds_ptr, T, each, length, STEP)
    if n > 0:
        i = tl.arange(0, C)
        row = begin * H + h
        part = (pid % NK) * total_tokens * H + row + i * H
        before_ptr += (r * H + h) * (K * V) + first * V
        after_ptr += (r * H + h) * (K * V) + first * V
        do_ptr += row * V
        dx_ptr += row * V
        right_ptr += row * V
        beta = load_scalars(beta_ptr + row, n, H, C)
        q = load_rows(q_ptr + row * K, n, H * K, first, K, C, BK)
        k = load_rows(k_ptr + row * K, n, H * K, first, K, C, BK)
        if DECAY:
            c, whole = load_fade(fade_ptr + (r * H + h) * C, C)
            since = power(c)

        # What the queries read: dQ.
        A = tl.zeros([C, C], tl.float32)
        dq = tl.zeros([C, BK], tl.float32)
        for column in tl.range(0, NV * BV, BV, num_stages=STAGES):
            do = load_rows(do_ptr, n, H * V, column, V, C, BV)
            right = load_rows(right_ptr, n, H * V, column, V, C, BV)
            where, inside = state_at(before_ptr, column, K - first, V, BK, BV)
            S = tl.load(where, mask=inside, other=0.0)
            A = dot(do, tl.trans(right), A, DT, PRECISION)
            dq = dot(do, tl.trans(S), dq, DT, PRECISION)
        if DECAY:
            A = A * between(c, C, False) * scale
            dq = dq * (since * scale)[:, None]
            x = tl.sum(dq * q.to(tl.float32), 1)
        else:
            A = tl.where(i[:, None] >= i[None, :], A * scale, 0.0)
            dq = dq * scale
        G = dot(q, tl.trans(k), None, DT, PRECISION) * A  # what flows from j to i, without beta_j
        columns = tl.sum(G, 0)
        if DECAY:
            rows = tl.sum(G * beta[None, :], 1)
        A = rounded(A * beta[None, :], DT)
        dq = dot(A, k, dq, DT, PRECISION)
        store_rows(dq_ptr + row * K, dq, n, H * K, first, K, C, BK)

        # What is left to the state, what keys are to each other, what is erased: dK.
        N = tl.zeros([C, C], tl.float32)
        dk = tl.zeros([C, BK], tl.float32)
        for column in tl.range(0, NV * BV, BV, num_stages=STAGES):
            dx = load_rows(dx_ptr, n, H * V, column, V, C, BV)
            right = load_rows(right_ptr, n, H * V, column, V, C, BV)
            where, inside = state_at(after_ptr, column, K - first, V, BK, BV)
            Z = tl.load(where, mask=inside, other=0.0)
            N = dot(dx, tl.trans(right), N, DT, PRECISION)
            dk = dot(right, tl.trans(Z), dk, DT, PRECISION)
        if DECAY:
            N = N * between(c, C, False)
            dk = dk * power(whole - c)[:, None]
        N = tl.where(i[:, None] > i[None, :], N, 0.0)
        y = tl.sum(dk * k.to(tl.float32), 1)
        G = dot(k, tl.trans(k), None, DT, PRECISION) * N
        columns -= tl.sum(G, 0)
        tl.store(dbeta_ptr + part, columns + y, mask=i < n)
        if DECAY:
            rows -= tl.sum(G * beta[None, :], 1)
        N = N * beta[None, :]
        dk = dk * beta[:, None]
        dk = dot(-(N + tl.trans(N)), k, dk, DT, PRECISION)
        dk = dot(tl.trans(A), q, dk, DT, PRECISION)
        erased = tl.zeros([C, BK], tl.float32)
        for column in tl.range(0, NV * BV, BV, num_stages=STAGES):
            dx = load_rows(dx_ptr, n, H * V, column, V, C, BV)
            where, inside = state_at(before_ptr, column, K - first, V, BK, BV)
            S = tl.load(where, mask=inside, other=0.0)
            erased = dot(dx, tl.trans(S), erased, DT, PRECISION)
        if DECAY:
            erased = erased * since[:, None]
            x -= tl.sum(erased * k.to(tl.float32), 1)
        store_rows(dk_ptr + row * K, dk - erased, n, H * K, first, K, C, BK)

        if DECAY:
            y = y * beta
            crossing = tl.cumsum(rows - columns * beta + x, 0, reverse=True)
            numbers = tl.minimum(BK, K - first) * V
            stays = product_of_states(before_ptr, after_ptr, 0, numbers, BK * BV) * power(whole)
            tl.store(dfade_ptr + part, crossing + tl.cumsum(y, 0) - y + stays, mask=i < n)
