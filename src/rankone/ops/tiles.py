# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
"""What the GPU kernels of the recurrences share: pieces of sequences, tiles, and decays.

A program walks one *piece*: a whole sequence, or a part of one where sequences are too few to fill
the device. Tokens of all sequences lie in one row of B·T; a piece is a half-open range of it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankone.ops.launch import launch

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in Triton's interpreter, which cuts floats off where they are rounded and
has no products of bfloat16."""


class Pieces(NamedTuple):
    """Where the pieces of a batch, or of packed sequences, begin and end."""

    number: int
    """How many pieces there are; of packed sequences as many as could be needed."""
    each: int
    """Pieces of one sequence, where sequences are equally long."""
    length: int
    """Tokens of a piece."""
    tokens: int
    """T."""
    bounds: Tensor | None
    """Packed: [pieces, 3], where each begins and ends and whether its sequence goes on after it; or
    [sequences + 1] if every sequence is one piece."""
    first: Tensor | None
    """Packed: [sequences + 1], the first piece of every sequence."""

    @classmethod
    def of(cls, batch: int, tokens: int, cu_seqlens: Tensor | None, length: int | None) -> Pieces:
        """Pieces of `length` tokens; None for whole sequences."""
        if cu_seqlens is not None:
            return cls._packed(tokens, cu_seqlens, length)
        length = tokens if length is None else length
        each = -(-tokens // length)
        return cls(batch * each, each, length, tokens, None, None)

    @classmethod
    def _packed(cls, tokens: int, cu_seqlens: Tensor, length: int | None) -> Pieces:
        sequences = cu_seqlens.shape[0] - 1
        if length is None:
            return cls(sequences, 1, tokens, tokens, cu_seqlens, None)
        offsets = cu_seqlens.long()
        number = tokens // length + sequences
        first = torch.nn.functional.pad(((offsets.diff() + length - 1) // length).cumsum(0), (1, 0))
        piece = torch.arange(number, device=offsets.device)
        owner = torch.searchsorted(first[1:], piece, right=True).clamp_max(sequences - 1)
        begin = offsets[owner] + (piece - first[owner]) * length
        end = offsets[owner + 1]  # a piece that is not needed begins after its end
        after = torch.minimum(begin + length, end)
        bounds = torch.stack([torch.minimum(begin, end), after, (after < end).long()], dim=1)
        return cls(number, 1, length, tokens, bounds, first)

    def first_in(self, finer: Pieces) -> Tensor | None:
        """Packed: the number of the first one of the `finer` pieces in each of these."""
        if finer.first is None:
            return None
        if self.first is None:
            return finer.first[:-1]
        number = torch.arange(self.number, device=finer.first.device)
        owner = torch.searchsorted(self.first[1:], number, right=True)
        owner = owner.clamp_max(self.first.shape[0] - 2)
        return finer.first[owner] + (number - self.first[owner]) * (self.length // finer.length)

    @property
    def whole(self) -> bool:
        """Whether every piece is a whole sequence."""
        return self.each == 1 if self.bounds is None else self.bounds.dim() == 1

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What kernels take to find their piece: bounds, T, each, length."""
        return self.bounds, self.tokens, self.each, self.length

    @property
    def step(self) -> int:
        """How far the bounds of pieces are apart; 0 without bounds."""
        return 0 if self.bounds is None else 1 if self.bounds.dim() == 1 else 3


@triton.jit
@no_type_check
def piece(r, bounds_ptr, T, each, length, STEP: tl.constexpr):
    """First token of piece r among all tokens, and how many it has."""
    if STEP > 0:
        begin = tl.load(bounds_ptr + r * STEP).to(tl.int64)
        end = tl.load(bounds_ptr + r * STEP + 1).to(tl.int64)
    else:
        b = r // each
        begin = b * T + (r - b * each) * length
        end = tl.minimum(begin + length, (b + 1) * T)
    return begin, (end - begin).to(tl.int32)


@triton.jit
@no_type_check
def rounded(x, dtype: tl.constexpr):
    """x in another dtype, rounded to nearest."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
@no_type_check
def load_rows(
    ptr, left, stride: tl.constexpr, first, N: tl.constexpr, C: tl.constexpr, B: tl.constexpr
):
    """C rows of columns first to first + B of N; zeros outside. `left` rows are there."""
    i = tl.arange(0, C)
    j = first + tl.arange(0, B)
    at = ptr + i[:, None] * stride + j[None, :]
    inside = (i < left)[:, None]
    if N % B != 0:
        inside = inside & (j < N)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
@no_type_check
def store_rows(
    ptr, x, left, stride: tl.constexpr, first, N: tl.constexpr, C: tl.constexpr, B: tl.constexpr
):
    """The rows that are there, in the dtype of the memory."""
    i = tl.arange(0, C)
    j = first + tl.arange(0, B)
    at = ptr + i[:, None] * stride + j[None, :]
    inside = (i < left)[:, None]
    if N % B != 0:
        inside = inside & (j < N)[None, :]
    tl.store(at, rounded(x, ptr.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def load_scalars(ptr, left, H: tl.constexpr, C: tl.constexpr):
    """One number of each of C tokens, in float32; zeros outside."""
    i = tl.arange(0, C)
    return tl.load(ptr + i * H, mask=i < left, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def load_fade(ptr, C: tl.constexpr):
    """c of a chunk's tokens, and c_C."""
    return tl.load(ptr + tl.arange(0, C)), tl.load(ptr + C - 1)


@triton.jit
@no_type_check
def slot(r, slots_ptr, slots, each, length, C: tl.constexpr, STEP: tl.constexpr):
    """The number of piece r's first chunk among all chunks; `slots` are those of a sequence, and
    packed `slots_ptr` has the numbers."""
    if STEP > 0:
        return tl.load(slots_ptr + r).to(tl.int64)
    b = r // each
    return b * slots + (r - b * each) * (length // C)


@triton.jit
@no_type_check
def load_state(
    ptr, first, K: tl.constexpr, V: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Columns `first` … of a state with strides SK and SV, transposed: [BV, BK] in float32."""
    i = tl.arange(0, BK)[None, :]
    j = first + tl.arange(0, BV)[:, None]
    at = ptr + i * SK + j * SV
    return tl.load(at, mask=(i < K) & (j < V), other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def store_state(
    ptr, S, first, K: tl.constexpr, V: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_state`, in the dtype of the memory."""
    i = tl.arange(0, BK)[None, :]
    j = first + tl.arange(0, BV)[:, None]
    at = ptr + i * SK + j * SV
    tl.store(at, rounded(S, ptr.dtype.element_ty), mask=(i < K) & (j < V))


@triton.jit
@no_type_check
def dot(a, b, acc, DT: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b with operands in DT and sums in float32."""
    a = rounded(a, DT)
    b = rounded(b, DT)
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
@no_type_check
def power(x):
    """2^x; nothing but the one instruction for it, which makes zeros of what is below 2^-126. What
    overflows is masked by those who call."""
    if INTERPRETED:
        return tl.exp2(tl.minimum(x, 127.0))
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
@no_type_check
def between(c, C: tl.constexpr, BACKWARD: tl.constexpr):
    """D_ij = 2^(c_i - c_j) for i >= j, 0 above; BACKWARD its transpose."""
    i = tl.arange(0, C)
    if BACKWARD:
        return tl.where(i[:, None] <= i[None, :], power(c[None, :] - c[:, None]), 0.0)
    return tl.where(i[:, None] >= i[None, :], power(c[:, None] - c[None, :]), 0.0)


@triton.jit(do_not_specialize=["T", "each", "length"])
@no_type_check
def _fade_kernel(
    decay_ptr, out_ptr, bounds_ptr, T, each, length,
    H: tl.constexpr, BH: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Running sums of decay in one chunk in powers of 2, for some heads; places beyond the end have
    the sum of all. Below 2^-127, which is zero, a factor is no smaller: the sums keep their digits
    for the tokens behind it."""
    BLOCKS: tl.constexpr = (H + BH - 1) // BH
    pid = tl.program_id(0).to(tl.int64)
    r = pid // BLOCKS
    begin, n = piece(r, bounds_ptr, T, each, length, STEP)
    h = (pid % BLOCKS) * BH + tl.arange(0, BH)[None, :]
    i = tl.arange(0, C)[:, None]
    inside = (i < n) & (h < H)
    decay = tl.load(decay_ptr + (begin + i) * H + h, mask=inside, other=0.0).to(tl.float32)
    c = tl.cumsum(tl.maximum(decay * 1.4426950408889634, -127.0), 0)
    tl.store(out_ptr + (r * H + h) * C + i, c, mask=h < H)


def fades(decay: Tensor, chunks: Pieces) -> Tensor:
    """c, the running sums of decay [B, T, H] inside chunks, [chunks, H, C] in float32. They are in
    powers of 2: a factor is 2^c."""
    H, chunk = decay.shape[2], chunks.length
    out = decay.new_empty(chunks.number, H, chunk, dtype=torch.float32)
    block = min(32, padded(H))
    constants = {"H": H, "BH": block, "C": chunk, "STEP": chunks.step}
    programs = chunks.number * -(-H // block)
    launch(_fade_kernel, programs, (decay, out, *chunks.arguments), constants, warps=2)
    return out


@triton.jit
@no_type_check
def product_of_states(before_ptr, after_ptr, at, N, BLOCK: tl.constexpr):
    """<S, Z> of two states, or of N numbers of them."""
    j = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, N, BLOCK):
        inside = first + j < N
        S = tl.load(before_ptr + at + first + j, mask=inside, other=0.0).to(tl.float32)
        Z = tl.load(after_ptr + at + first + j, mask=inside, other=0.0).to(tl.float32)
        total += S * Z
    return tl.sum(total, 0)


class Arithmetic(NamedTuple):
    """How products are computed for a dtype of inputs."""

    dtype: Any
    """Of the operands; sums are in float32."""
    precision: str
    memory: torch.dtype
    """Of what is kept between kernels."""

    @classmethod
    def of(cls, q: Tensor) -> Arithmetic:
        """bfloat16 as it is, but in tf32 with 32 keys or fewer, where too few products are summed
        for the errors of rounding them to average out; float16 in tf32, which holds it exactly
        and whose range holds sums of its products; float32 in six products of its three bfloat16
        parts, which take fewer registers than three products in tf32."""
        if q.dtype == torch.float32:
            return cls(tl.float32, "bf16x6", torch.float32)
        if q.dtype == torch.float16 or padded(q.shape[3]) <= 32:
            return cls(tl.float32, "tf32", torch.float32)
        return cls(tl.bfloat16, "tf32", torch.bfloat16)


@no_type_check  # a symbol where shapes are
def padded(size: int) -> int:
    """The tile that holds `size` columns: a power of two, at least 16."""
    return max(16, 1 << (int(size) - 1).bit_length())


@no_type_check
def tile(arithmetic: Arithmetic, keys: int, values: int) -> tuple[int, int, int]:
    """Tokens of a chunk, columns of the values that a program has, and its warps.

    Operands of 4 bytes are held in registers: the tiles are smaller, the larger the heads. With
    more, the compiler spills thousands of bytes a thread, or gives up and allocates 32 registers.
    """
    largest = max(padded(keys), padded(values))
    if arithmetic.dtype == tl.bfloat16:
        return (64, 64, 4) if largest <= 128 else (32, 64, 8)
    most = 64 if arithmetic.precision == "bf16x6" else 128
    return (32, 32, 4) if largest <= most else (16, 32, 8)


def processors_of(device: torch.device) -> int:
    """How many multiprocessors a device has; a large one's number in the interpreter."""
    return 132 if device.type != "cuda" else _processors_of(device)


@cache
def _processors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
