# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
"""Loss and gradient of an ensemble of linear transformers in one GPU kernel.

A sequence enters only through its Gram matrix ``G_0`` (D × D, D = d + 1). With
``N_l = I + Σ_h P_h G_l Q_h``, ``G_{l+1} = N_l G_l N_lᵀ``, ``r_L = e_D`` and ``r_l = r_{l+1} N_l``
the model's weights are ``ŵ = -r_0[:d]`` and the loss is ``½ ‖ŵ - w‖²``. The kernel runs forward
and backward for one sequence a warp without leaving the multiprocessor:

    g_0 = -(ŵ - w),  g_{l+1} = N_l g_l                   vectors, upwards
    T = Z N              (Z = 2 ∂/∂G_{l+1}, symmetric)    layers downwards
    Γ = ∂/∂N_l = T G + r_{l+1} g_lᵀ
    Xᵀ = Q_h Γᵀ,   ∂P_hᵀ += G Xᵀ
    Yᵀ = Γᵀ P_h,   ∂Q_hᵀ += Yᵀ G
    Z ← Tᵀ N + W + Wᵀ,   W = Σ_h Xᵀ P_h

In the last layer only the last row of N matters, so everything there is a vector. The diagonal
kind has ``N = I + Ω ∘ G`` and loses the products with P and Q.

**Work.** A layer below the last costs, for a sequence and a head, 12 products of D × D matrices
(4 forward, 8 backward; 2 fewer in the first layer), the diagonal kind 6. At d = 10 a matrix is
padded to 16 × 16: 12 · 2 · 16³ = 98 kFLOP a layer where 12 · 2 · 11³ = 32 k are useful. A sequence
reads (D² + d) · 4 = 524 bytes once; G_l, N_l and the sums of ∂P, ∂Q live in registers (8 a thread
for each matrix; the compiler spills what does not fit to the level-1 cache), P and Q, split once a
program, in shared memory. So 50 members × 2,048 sequences × 7 layers are 60 GFLOP of padded
products and 54 MB: bound by instructions, not by memory.

**Precision.** Tensor cores have no float32. ``bf16x6`` writes x = x₀ + x₁ + x₂ exactly, with three
bfloat16 parts, each rounded to nearest, and adds the six products that matter: float32 accuracy
(parts cut off towards zero are up to twice as large and all of one sign: ten times the error).
``bf16x3`` keeps two rounded parts and three products (about 2⁻¹⁶). ``tf32x3``, ``tf32`` (about
2⁻¹¹) and ``ieee``
(float32 without tensor cores) are Triton's own. The layout of a bfloat16 accumulator is at once
that of a left operand and of a transposed right operand, so the products are arranged as A Bᵀ
wherever symmetry allows: those need no exchange between threads. P and Q are never transposed,
so that shared memory holds one copy of each.

**Order.** No atomics: a program adds its sequences in order and writes its own slot of a buffer
that one ``sum`` reduces, so equal inputs give equal bits. A member that diverges spoils only its
own numbers.
"""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from rankone.icl.gradients.reference import EXPLODED

EXPLODED_AT = tl.constexpr(EXPLODED)
MAX_SIZE = 32
"""The largest D = d + 1 that the kernels take."""

PRECISIONS = ("bf16x6", "bf16x3", "tf32x3", "tf32", "ieee")


class Variant(NamedTuple):
    """How a kernel is compiled and laid out; the result differs only by rounding."""

    precision: str = "bf16x6"
    """One of `PRECISIONS`."""
    block: int = 1
    """Sequences a program works on at a time: a power of two."""
    warps: int = 1
    """Warps a program; with block = warps each warp has a sequence of its own."""
    programs: int | None = None
    """Programs a member; None fills the device once."""
    registers: int | None = None
    """Cap on the registers of a thread; fewer registers, more warps at once, more spills."""


def variants() -> tuple[Variant, ...]:
    """Variants worth timing, the default first."""
    return (
        Variant(),
        Variant(registers=168),
        Variant(registers=128),
        Variant(programs=128),
        Variant(block=2),
        Variant(block=4, warps=4),
        Variant("bf16x3"),
        Variant("bf16x3", registers=168),
        Variant("bf16x3", registers=128),
        Variant("bf16x3", block=2),
        Variant("bf16x3", block=4, warps=4),
        Variant("tf32x3"),
        Variant("tf32x3", registers=128),
        Variant("tf32"),
    )


def full_loss_and_grad(
    P: Float[Tensor, "R L H D D"],
    Q: Float[Tensor, "R L H D D"],
    gram: Float[Tensor, "S B D D"],
    weights: Float[Tensor, "S B d"],
    stream: Int[Tensor, " R"],
    importance: Float[Tensor, "S B"],
    limit: Float[Tensor, " R"] | None = None,
    *,
    variant: Variant | None = None,
) -> tuple[Float[Tensor, " R"], Float[Tensor, "R L H D D"], Float[Tensor, "R L H D D"]]:
    """Mean loss over the batch and its gradients ``(loss, dP, dQ)`` for every member.

    Member r reads the sequences ``gram[stream[r]]``. Tensors are float32, contiguous and on one
    CUDA device; shapes are taken as right. Nothing waits for the device. `limit` as in the API,
    None for no limit.
    """
    v = variant or Variant()
    members, layers, heads, size, _ = P.shape
    batch = gram.shape[1]
    stored = 2 * (layers - 1) * heads * _padded(size) ** 2
    programs, trips = _schedule(members, batch, layers, stored, v, P.device)
    numel = P.numel()
    out = P.new_empty(programs, 2 * numel + members)
    sharpness = P.new_zeros(members) if limit is None else 1.0 / limit
    _full_kernel[(members, programs)](
        P, Q, gram, weights, stream, importance, sharpness, out, trips, batch, members,
        1.0 / batch, L=layers, H=heads, **_meta(size, v),
    )  # fmt: skip
    total = out.sum(0)
    return total[2 * numel :], total[:numel].view_as(P), total[numel : 2 * numel].view_as(Q)


def diag_loss_and_grad(
    omega: Float[Tensor, "R L 4"],
    gram: Float[Tensor, "S B D D"],
    weights: Float[Tensor, "S B d"],
    stream: Int[Tensor, " R"],
    importance: Float[Tensor, "S B"],
    limit: Float[Tensor, " R"] | None = None,
    *,
    variant: Variant | None = None,
) -> tuple[Float[Tensor, " R"], Float[Tensor, "R L 4"]]:
    """Mean loss and its gradient ``(loss, domega)`` for members of the diagonal kind.

    ``omega[r, l] = (xx, xy, yx, yy)``; GD++ has xy = yy = 0. Otherwise as `full_loss_and_grad`.
    """
    v = variant or Variant()
    members, layers, _ = omega.shape
    batch, size = gram.shape[1], gram.shape[2]
    programs, trips = _schedule(members, batch, layers, 0, v, omega.device)
    numel = omega.numel()
    out = omega.new_empty(programs, numel + members)
    sharpness = omega.new_zeros(members) if limit is None else 1.0 / limit
    _diag_kernel[(members, programs)](
        omega, gram, weights, stream, importance, sharpness, out, trips, batch, members,
        1.0 / batch, L=layers, **_meta(size, v),
    )  # fmt: skip
    total = out.sum(0)
    return total[numel:], total[:numel].view_as(omega)


def _padded(size: int) -> int:
    return max(16, int(triton.next_power_of_2(size)))


def _interpreted() -> bool:
    return not isinstance(_full_kernel, triton.runtime.JITFunction)


def _meta(size: int, v: Variant) -> dict[str, object]:
    """Compile-time arguments common to both kernels."""
    meta: dict[str, object] = {
        "D": size,
        "DP": _padded(size),
        "BB": v.block,
        "PRECISION": v.precision,
        "NATIVE": True,
        "num_warps": v.warps,
        "num_stages": 1,
    }
    if v.registers is not None:
        meta["maxnreg"] = v.registers
    if _interpreted():  # it holds bfloat16 as integers, so the parts stay float32 there
        meta["NATIVE"] = False
        del meta["num_warps"], meta["num_stages"]
        meta.pop("maxnreg", None)
    return meta


def _schedule(
    members: int, batch: int, layers: int, stored: int, v: Variant, device: torch.device
) -> tuple[int, object]:
    """Programs a member, and the blocks that each of them takes one after another.

    By default as many programs as the device holds at once: no second, half-empty wave. `stored`
    is how many floats a program keeps in shared memory for each sequence of its block.
    """
    blocks = triton.cdiv(batch, v.block)
    if v.programs is not None:
        programs = v.programs
    elif device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        registers = v.registers or min(255, 64 + 104 * (layers - 1))  # as compiled at d = 10
        width = {"bf16x6": 6, "bf16x3": 4}.get(v.precision, 8)
        resident = min(
            65536 // (32 * v.warps * registers),
            232448 // (1024 + (stored * width + 2048) * v.block),
        )
        programs = max(1, processors * max(1, resident) // members)
    else:
        programs = 2
    trips = triton.cdiv(blocks, min(programs, blocks))
    programs = triton.cdiv(blocks, trips)
    # Triton 3.6 interpreting with numpy 2.4 cannot make a range of anything but a constant.
    return programs, tl.constexpr(trips) if _interpreted() else trips


# Jitted functions carry no annotations but tl.constexpr; the run-time checks leave them alone.


@triton.jit
@no_type_check
def _transpose(x):
    return tl.permute(x, (0, 2, 1))


@triton.jit
@no_type_check
def _flip(parts):
    """Transpose every part of a split matrix."""
    flipped = ()
    for k in tl.static_range(len(parts)):
        flipped = flipped + (_transpose(parts[k]),)
    return flipped


# Two neighbours x, y of a thread at a time, each part packed into one register. One operation for
# Triton, whose passes are quadratic in the number of operations, and eleven (six) instructions.
_CUT_IN_THREE = tl.constexpr(
    """{
    .reg .b32 a, b;
    .reg .f32 x, y, p, q;
    mov.b32 x, $3;
    mov.b32 y, $4;
    cvt.rn.bf16x2.f32 a, y, x;
    shl.b32 b, a, 16;
    mov.b32 p, b;
    and.b32 b, a, 0xffff0000;
    mov.b32 q, b;
    mov.b32 $0, a;
    sub.f32 x, x, p;
    sub.f32 y, y, q;
    cvt.rn.bf16x2.f32 a, y, x;
    shl.b32 b, a, 16;
    mov.b32 p, b;
    and.b32 b, a, 0xffff0000;
    mov.b32 q, b;
    mov.b32 $1, a;
    sub.f32 x, x, p;
    sub.f32 y, y, q;
    cvt.rn.bf16x2.f32 $2, y, x;
    }"""
)
_CUT_IN_TWO = tl.constexpr(
    """{
    .reg .b32 a, b;
    .reg .f32 x, y, p, q;
    mov.b32 x, $2;
    mov.b32 y, $3;
    cvt.rn.bf16x2.f32 a, y, x;
    shl.b32 b, a, 16;
    mov.b32 p, b;
    and.b32 b, a, 0xffff0000;
    mov.b32 q, b;
    mov.b32 $0, a;
    sub.f32 x, x, p;
    sub.f32 y, y, q;
    cvt.rn.bf16x2.f32 $1, y, x;
    }"""
)


@triton.jit
@no_type_check
def _cut(x):
    """The nearest bfloat16 of x and the rest, both held in float32: for the interpreter."""
    bits = x.to(tl.int32, bitcast=True) + 0x8000
    head = (bits & -0x10000).to(tl.float32, bitcast=True)
    return head, x - head


@triton.jit
@no_type_check
def _split(x, PRECISION: tl.constexpr, NATIVE: tl.constexpr):
    """What `_multiply` takes for a matrix: its bfloat16 parts, or the matrix itself."""
    if PRECISION == "bf16x6":
        if NATIVE:
            return tl.inline_asm_elementwise(
                _CUT_IN_THREE,
                "=&r,=&r,=&r,r,r",
                [x.to(tl.int32, bitcast=True)],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
        else:
            x0, rest = _cut(x)
            x1, x2 = _cut(rest)
            return (x0, x1, x2)
    elif PRECISION == "bf16x3":
        if NATIVE:
            return tl.inline_asm_elementwise(
                _CUT_IN_TWO,
                "=&r,=&r,r,r",
                [x.to(tl.int32, bitcast=True)],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
        else:
            x0, rest = _cut(x)
            x1, rest = _cut(rest)
            return (x0, x1)
    else:
        return (x,)


@triton.jit
@no_type_check
def _multiply(a, b, c, PRECISION: tl.constexpr):
    """The sum c + a b of split a and b, smallest terms first."""
    if PRECISION == "bf16x6":
        c = tl.dot(a[2], b[0], c, input_precision="ieee")
        c = tl.dot(a[0], b[2], c, input_precision="ieee")
        c = tl.dot(a[1], b[1], c, input_precision="ieee")
    if PRECISION == "bf16x6" or PRECISION == "bf16x3":
        c = tl.dot(a[1], b[0], c, input_precision="ieee")
        c = tl.dot(a[0], b[1], c, input_precision="ieee")
        return tl.dot(a[0], b[0], c, input_precision="ieee")
    else:
        return tl.dot(a[0], b[0], c, input_precision=PRECISION)


@triton.jit
@no_type_check
def _row_times(v, m):
    """The product v m for a row vector v of every sequence."""
    return tl.sum(v[:, :, None] * m, axis=1)


@triton.jit
@no_type_check
def _times_column(m, v):
    """The product m v for a column vector v of every sequence."""
    return tl.sum(m * v[:, None, :], axis=2)


@triton.jit
@no_type_check
def _temper(square, sharpness):
    """asinh(square · sharpness) / sharpness, its derivative, and whether it did not explode.

    Sharpness = 1 / limit may be 0: then nothing counts as exploded.
    """
    sharpness += tl.zeros_like(square)  # a block, since the interpreter mixes no shapes
    fine = (square <= EXPLODED_AT) | (sharpness == 0.0)
    square = tl.where(fine, square, EXPLODED_AT)
    x = square * sharpness
    root = tl.sqrt(1.0 + x * x)
    large = tl.log(x + root) / tl.maximum(sharpness, 1e-30)
    return tl.where(x < 1e-2, square * (1.0 - x * x / 6.0), large), 1.0 / root, fine


@triton.jit
@no_type_check
def _keep(fine, tensors):
    """Zeros where a sequence exploded, so that it adds nothing to any gradient."""
    kept = ()
    for k in tl.static_range(len(tensors)):
        t = tensors[k]
        if len(t.shape) == 3:
            kept = kept + (tl.where(fine[:, None, None], t, 0.0),)
        else:
            kept = kept + (tl.where(fine[:, None], t, 0.0),)
    return kept


@triton.jit
@no_type_check
def _shared_matrix(ptr, D: tl.constexpr, DP: tl.constexpr, BB: tl.constexpr):
    """One padded D × D matrix, the same for every sequence of the block."""
    i = tl.arange(0, DP)
    row = i[None, :, None]
    col = i[None, None, :]
    m = tl.load(ptr + row * D + col, mask=(row < D) & (col < D), other=0.0)
    return tl.broadcast_to(m, [BB, DP, DP])


@triton.jit
@no_type_check
def _read_block(
    gram_ptr,
    w_ptr,
    importance_ptr,
    first,
    start,
    batch,
    D: tl.constexpr,
    DP: tl.constexpr,
    BB: tl.constexpr,
):
    """Gram matrices, true weights and importance of a block; beyond the batch all are zero, and
    so is everything that follows from them."""
    i = tl.arange(0, DP)
    row = i[None, :, None]
    col = i[None, None, :]
    n = start + tl.arange(0, BB)
    inside = n < batch
    n = first + n
    g = tl.load(
        gram_ptr + n[:, None, None] * (D * D) + row * D + col,
        mask=inside[:, None, None] & (row < D) & (col < D),
        other=0.0,
    )
    w = tl.load(
        w_ptr + n[:, None] * (D - 1) + i[None, :],
        mask=inside[:, None] & (i < D - 1)[None, :],
        other=0.0,
    )
    importance = tl.load(importance_ptr + n, mask=inside, other=0.0)
    return g, w, importance


@triton.jit(do_not_specialize=["trips", "batch", "members", "scale"])
@no_type_check
def _full_kernel(
    p_ptr,
    q_ptr,
    gram_ptr,
    w_ptr,
    stream_ptr,
    importance_ptr,
    sharpness_ptr,
    out_ptr,
    trips,
    batch,
    members,
    scale,
    L: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BB: tl.constexpr,
    PRECISION: tl.constexpr,
    NATIVE: tl.constexpr,
):
    member = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    first = tl.load(stream_ptr + member).to(tl.int64) * batch
    sharpness = tl.load(sharpness_ptr + member)
    i = tl.arange(0, DP)
    row = i[None, :, None]
    col = i[None, None, :]
    eye = tl.where((row == col) & (row < D), 1.0, 0.0)
    unit = tl.where(i == D - 1, 1.0, 0.0)[None, :]
    zero = tl.zeros([BB, DP, DP], tl.float32)
    DD: tl.constexpr = D * D
    p_ptr += member * (L * H * DD)
    q_ptr += member * (L * H * DD)
    last_row = p_ptr + (L - 1) * H * DD + (D - 1) * D + i

    # Sums over the sequences of this program, transposed; the last layer's P has one row.
    dp = ()
    dp_last = ()
    dq = ()
    for _ in tl.static_range((L - 1) * H):
        dp = dp + (zero,)
    for _ in tl.static_range(H):
        dp_last = dp_last + (tl.zeros([BB, DP], tl.float32),)
    for _ in tl.static_range(L * H):
        dq = dq + (zero,)
    loss = tl.zeros([BB], tl.float32)

    for trip in range(trips):
        start = (trip * programs + program) * BB
        g, w, importance = _read_block(
            gram_ptr, w_ptr, importance_ptr, first, start, batch, D, DP, BB
        )

        # Forward: G_l and N_l of every layer but the last.
        grams = ()
        steps = ()
        for l in tl.static_range(L - 1):
            g_parts = _split(g, PRECISION, NATIVE)
            n = tl.broadcast_to(eye, [BB, DP, DP])
            for h in tl.static_range(H):
                p = _split(_shared_matrix(p_ptr + (l * H + h) * DD, D, DP, BB), PRECISION, NATIVE)
                q = _split(_shared_matrix(q_ptr + (l * H + h) * DD, D, DP, BB), PRECISION, NATIVE)
                pg = _multiply(p, _flip(g_parts), zero, PRECISION)
                n = _multiply(_split(pg, PRECISION, NATIVE), q, n, PRECISION)
            n_parts = _split(n, PRECISION, NATIVE)
            ng = _multiply(n_parts, _flip(g_parts), zero, PRECISION)
            grams = grams + (g,)
            steps = steps + (n,)
            g = _multiply(_split(ng, PRECISION, NATIVE), _flip(n_parts), zero, PRECISION)

        # The last row of the product of all steps, and the loss.
        r = tl.broadcast_to(unit, [BB, DP])
        us = ()
        for h in tl.static_range(H):
            p_row = tl.load(last_row + h * DD, mask=i < D, other=0.0)[None, :]
            q_mat = _shared_matrix(q_ptr + ((L - 1) * H + h) * DD, D, DP, BB)
            u = _times_column(g, p_row)
            us = us + (u,)
            r += _row_times(u, q_mat)
        rows = (r,)
        for l in tl.static_range(L - 2, -1, -1):
            r = _row_times(r, steps[l])
            rows = (r,) + rows
        error = tl.where((i < D - 1)[None, :], -r - w, 0.0)
        counted, weight, fine = _temper(tl.sum(error * error, axis=1), sharpness)
        loss += importance * counted
        v = tl.where(fine[:, None], -error * (importance * weight)[:, None], 0.0)
        g = tl.where(fine[:, None, None], g, 0.0)
        grams, steps, rows = _keep(fine, grams), _keep(fine, steps), _keep(fine, rows)
        us = _keep(fine, us)
        columns = (v,)
        for l in tl.static_range(L - 1):
            v = _times_column(steps[l], v)
            columns = columns + (v,)

        # Backward through the last layer.
        z = zero
        new_dp_last = ()
        new_dq = ()
        for h in tl.static_range(H):
            p_row = tl.load(last_row + h * DD, mask=i < D, other=0.0)[None, :]
            q_mat = _shared_matrix(q_ptr + ((L - 1) * H + h) * DD, D, DP, BB)
            x = _times_column(q_mat, v)
            new_dp_last = new_dp_last + (dp_last[h] + _row_times(x, g),)
            new_dq = new_dq + (dq[(L - 1) * H + h] + v[:, :, None] * us[h][:, None, :],)
            z += p_row[:, :, None] * x[:, None, :] + x[:, :, None] * p_row[:, None, :]

        # Backward through the others.
        new_dp = ()
        for l in tl.static_range(L - 2, -1, -1):
            g_parts = _split(grams[l], PRECISION, NATIVE)
            n_parts = _split(steps[l], PRECISION, NATIVE)
            t = _multiply(_split(z, PRECISION, NATIVE), n_parts, zero, PRECISION)
            t_parts = _split(t, PRECISION, NATIVE)
            dn = rows[l + 1][:, :, None] * columns[l][:, None, :]
            dn = _split(_multiply(t_parts, _flip(g_parts), dn, PRECISION), PRECISION, NATIVE)
            if l > 0:
                z = _multiply(_flip(t_parts), n_parts, zero, PRECISION)
            dg = zero
            for h in tl.static_range(H - 1, -1, -1):
                p = _split(_shared_matrix(p_ptr + (l * H + h) * DD, D, DP, BB), PRECISION, NATIVE)
                q = _split(_shared_matrix(q_ptr + (l * H + h) * DD, D, DP, BB), PRECISION, NATIVE)
                x = _split(_multiply(q, _flip(dn), zero, PRECISION), PRECISION, NATIVE)
                y = _split(_multiply(_flip(dn), p, zero, PRECISION), PRECISION, NATIVE)
                new_dp = (_multiply(g_parts, x, dp[l * H + h], PRECISION),) + new_dp
                new_dq = (_multiply(y, _flip(g_parts), dq[l * H + h], PRECISION),) + new_dq
                if l > 0:
                    dg = _multiply(x, p, dg, PRECISION)
            if l > 0:
                z += dg + _transpose(dg)
        dp = new_dp
        dp_last = new_dp_last
        dq = new_dq

    # This program's slot: dP of every member, dQ of every member, the losses.
    size = members.to(tl.int64) * (L * H * DD)
    out_ptr += program.to(tl.int64) * (2 * size + members)
    slot = out_ptr + member * (L * H * DD) + i[None, :] * D + i[:, None]
    inside = (i[:, None] < D) & (i[None, :] < D)
    for l in tl.static_range(L):
        for h in tl.static_range(H):
            if l < L - 1:
                total = tl.sum(dp[l * H + h], axis=0)
            else:
                total = tl.where(i[None, :] == D - 1, tl.sum(dp_last[h], axis=0)[:, None], 0.0)
            tl.store(slot + (l * H + h) * DD, total * scale, mask=inside)
            total = tl.sum(dq[l * H + h], axis=0)
            tl.store(slot + size + (l * H + h) * DD, total * scale, mask=inside)
    tl.store(out_ptr + 2 * size + member, tl.sum(loss, axis=0) * (0.5 * scale))


@triton.jit
@no_type_check
def _omega(ptr, D: tl.constexpr, DP: tl.constexpr):
    """The four scalars of a layer spread over their blocks, [1, DP, DP]."""
    i = tl.arange(0, DP)
    row = i[None, :, None]
    col = i[None, None, :]
    top = tl.where(col < D - 1, tl.load(ptr), tl.load(ptr + 1))
    bottom = tl.where(col < D - 1, tl.load(ptr + 2), tl.load(ptr + 3))
    return tl.where((row < D) & (col < D), tl.where(row < D - 1, top, bottom), 0.0)


@triton.jit
@no_type_check
def _total(x):
    return tl.sum(tl.sum(tl.sum(x, axis=2), axis=1), axis=0)


@triton.jit(do_not_specialize=["trips", "batch", "members", "scale"])
@no_type_check
def _diag_kernel(
    omega_ptr,
    gram_ptr,
    w_ptr,
    stream_ptr,
    importance_ptr,
    sharpness_ptr,
    out_ptr,
    trips,
    batch,
    members,
    scale,
    L: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BB: tl.constexpr,
    PRECISION: tl.constexpr,
    NATIVE: tl.constexpr,
):
    member = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    first = tl.load(stream_ptr + member).to(tl.int64) * batch
    sharpness = tl.load(sharpness_ptr + member)
    i = tl.arange(0, DP)
    row = i[None, :, None]
    col = i[None, None, :]
    eye = tl.where((row == col) & (row < D), 1.0, 0.0)
    unit = tl.where(i == D - 1, 1.0, 0.0)[None, :]
    zero = tl.zeros([BB, DP, DP], tl.float32)
    omega_ptr += member * (L * 4)
    last = omega_ptr + (L - 1) * 4
    last_row = tl.where(i < D - 1, tl.load(last + 2), tl.where(i < D, tl.load(last + 3), 0.0))
    last_row = last_row[None, :]

    sums = ()  # Γ ∘ G of every layer but the last, of which only a row matters
    for _ in tl.static_range(L - 1):
        sums = sums + (zero,)
    sum_last = tl.zeros([BB, DP], tl.float32)
    loss = tl.zeros([BB], tl.float32)

    for trip in range(trips):
        start = (trip * programs + program) * BB
        g, w, importance = _read_block(
            gram_ptr, w_ptr, importance_ptr, first, start, batch, D, DP, BB
        )
        grams = ()
        steps = ()
        for l in tl.static_range(L - 1):
            g_parts = _split(g, PRECISION, NATIVE)
            n = eye + _omega(omega_ptr + l * 4, D, DP) * g
            n_parts = _split(n, PRECISION, NATIVE)
            ng = _multiply(n_parts, _flip(g_parts), zero, PRECISION)
            grams = grams + (g,)
            steps = steps + (n,)
            g = _multiply(_split(ng, PRECISION, NATIVE), _flip(n_parts), zero, PRECISION)

        g_row = tl.sum(tl.where(row == D - 1, g, 0.0), axis=1)
        r = unit + last_row * g_row
        rows = (r,)
        for l in tl.static_range(L - 2, -1, -1):
            r = _row_times(r, steps[l])
            rows = (r,) + rows
        error = tl.where((i < D - 1)[None, :], -r - w, 0.0)
        counted, weight, fine = _temper(tl.sum(error * error, axis=1), sharpness)
        loss += importance * counted
        v = tl.where(fine[:, None], -error * (importance * weight)[:, None], 0.0)
        g = tl.where(fine[:, None, None], g, 0.0)
        grams, steps, rows = _keep(fine, grams), _keep(fine, steps), _keep(fine, rows)
        g_row = tl.where(fine[:, None], g_row, 0.0)
        columns = (v,)
        for l in tl.static_range(L - 1):
            v = _times_column(steps[l], v)
            columns = columns + (v,)

        sum_last += v * g_row
        x = last_row * v
        z = tl.where(row == D - 1, x[:, None, :], 0.0) + tl.where(col == D - 1, x[:, :, None], 0.0)
        new_sums = ()
        for l in tl.static_range(L - 2, -1, -1):
            g_parts = _split(grams[l], PRECISION, NATIVE)
            n_parts = _split(steps[l], PRECISION, NATIVE)
            t = _multiply(_split(z, PRECISION, NATIVE), n_parts, zero, PRECISION)
            t_parts = _split(t, PRECISION, NATIVE)
            dn = rows[l + 1][:, :, None] * columns[l][:, None, :]
            dn = _multiply(t_parts, _flip(g_parts), dn, PRECISION)
            new_sums = (sums[l] + dn * grams[l],) + new_sums
            if l > 0:
                omega = _omega(omega_ptr + l * 4, D, DP)
                dn_t = columns[l][:, :, None] * rows[l + 1][:, None, :]
                dn_t = _multiply(g_parts, _flip(t_parts), dn_t, PRECISION)
                z = omega * dn + _transpose(omega) * dn_t
                z = _multiply(_flip(t_parts), n_parts, z, PRECISION)
        sums = new_sums

    out_ptr += program.to(tl.int64) * (members.to(tl.int64) * (L * 4) + members)
    slot = out_ptr + member * (L * 4)
    for l in tl.static_range(L):
        if l < L - 1:
            s = sums[l]
            xx = _total(tl.where((row < D - 1) & (col < D - 1), s, 0.0))
            xy = _total(tl.where((row < D - 1) & (col == D - 1), s, 0.0))
            yx = _total(tl.where((row == D - 1) & (col < D - 1), s, 0.0))
            yy = _total(tl.where((row == D - 1) & (col == D - 1), s, 0.0))
        else:
            xx = 0.0
            xy = 0.0
            yx = tl.sum(tl.sum(tl.where((i < D - 1)[None, :], sum_last, 0.0), axis=1), axis=0)
            yy = tl.sum(tl.sum(tl.where((i == D - 1)[None, :], sum_last, 0.0), axis=1), axis=0)
        tl.store(slot + l * 4, xx * scale)
        tl.store(slot + l * 4 + 1, xy * scale)
        tl.store(slot + l * 4 + 2, yx * scale)
        tl.store(slot + l * 4 + 3, yy * scale)
    out_ptr += members.to(tl.int64) * (L * 4)
    tl.store(out_ptr + member, tl.sum(loss, axis=0) * (0.5 * scale))
