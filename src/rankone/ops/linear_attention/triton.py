# mypy: disallow-untyped-calls=False
"""Linear attention in fused GPU kernels: how a call is laid out and launched, and its gradient.

The kernels and their equations are in `kernels`; docs/kernels.md tells how they were chosen.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, no_type_check

import torch
import triton.language as tl
from torch import Tensor

from rankone.ops.fused import contiguous, eager
from rankone.ops.launch import launch
from rankone.ops.linear_attention.kernels import (
    decay_kernel,
    prefix_kernel,
    scan_kernel,
    sum_kernel,
)
from rankone.ops.tiles import Arithmetic, Pieces, fades, padded, processors_of, tile

EXACT = 256
"""Tokens between two places where <S, Z> is computed anew."""
PIECE = 1024
"""Tokens of a piece, or a multiple of it."""


class Plan(NamedTuple):
    """How a call is laid out on the device; results differ only by rounding."""

    chunk: int
    """Tokens of a chunk."""
    columns: int
    """Columns of the values that a program has."""
    warps: int
    stages: int
    length: int | None
    """Tokens of a piece; None for whole sequences."""
    sum_columns: int
    """Columns of the values that a program has that sums a piece."""
    sum_warps: int


@no_type_check  # sizes are symbols where shapes are
def plan(
    arithmetic: Arithmetic, sequences: int, tokens: int, heads: int, keys: int, values: int,
    processors: int,
) -> Plan:  # fmt: skip
    """The layout for a call with `tokens` tokens in all."""
    chunk, columns, warps = tile(arithmetic, keys, values)
    programs = heads * -(-values // columns)
    length = None
    if sequences * programs < 0.9 * processors and tokens > 2 * PIECE * sequences:
        pieces = max(1, 2 * processors // programs)
        length = max(1, -(-tokens // (pieces * PIECE))) * PIECE
    full = length is not None or sequences * programs > processors
    return Plan(chunk, columns, warps, 2 if full else 3, length, columns, warps)


@no_type_check
def plan_of(q: Tensor, v: Tensor, sequences: int) -> Plan:
    """The layout for tensors q and v."""
    B, T, H, K = q.shape
    arithmetic, processors = Arithmetic.of(q), processors_of(q.device)
    return plan(arithmetic, sequences, B * T, H, K, v.shape[3], processors)


class Call(NamedTuple):
    """What all kernels of a call need."""

    q: Tensor
    k: Tensor
    v: Tensor
    fade: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    p: Plan
    pieces: Pieces
    chunks: Pieces | None
    """With decay: the chunks."""

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, cu_seqlens: Tensor | None,
        scale: float, p: Plan | None,
    ) -> Call:  # fmt: skip
        """The call with its plan, and with running sums of decay."""
        B, T = q.shape[:2]
        sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        p = p or plan_of(q, v, sequences)
        pieces = Pieces.of(B, T, cu_seqlens, p.length)
        if decay is None:
            return cls(q, k, v, None, cu_seqlens, scale, p, pieces, None)
        chunks = Pieces.of(B, T, cu_seqlens, p.chunk)
        fade = fades(decay, chunks)
        return cls(q, k, v, fade, cu_seqlens, scale, p, pieces, chunks)

    @property
    def sequences(self) -> int:
        """How many there are."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def shape_of_states(self) -> tuple[int, ...]:
        """[N, H, K, V]."""
        return self.sequences, self.q.shape[2], self.q.shape[3], self.v.shape[3]

    def side_by_side(self, scale: float) -> Call:
        """This call where pieces do not depend on each other: short ones, or packed sequences."""
        length = PIECE if self.cu_seqlens is None else None
        pieces = Pieces.of(self.q.shape[0], self.q.shape[1], self.cu_seqlens, length)
        return self._replace(pieces=pieces, scale=scale)

    def places(self, pieces: Pieces) -> tuple[Any, ...]:
        """What kernels take to find their piece and its chunks."""
        chunks = self.chunks
        if chunks is None:
            return *pieces.arguments, None, 0
        return *pieces.arguments, pieces.first_in(chunks), chunks.each

    def sizes(self, q: Tensor, v: Tensor, columns: int | None = None) -> dict[str, Any]:
        """Constants of a kernel whose queries and keys are like q and whose values are like v."""
        arithmetic = Arithmetic.of(self.q)
        columns = columns or self.p.columns
        if columns < 64:  # 32 columns of bfloat16 read where they must not: a compiler's fault
            columns = min(columns, padded(v.shape[3]))
        return {
            "H": q.shape[2],
            "K": q.shape[3],
            "V": v.shape[3],
            "C": self.p.chunk,
            "BK": padded(q.shape[3]),
            "BV": columns,
            "NV": -(-v.shape[3] // columns),
            "DT": arithmetic.dtype,
            "PRECISION": arithmetic.precision,
        }

    def states(
        self, k: Tensor, v: Tensor, initial: Tensor | None, final: Tensor, *,
        scale: float = 1.0, backward: bool = False,
    ) -> Tensor:  # fmt: skip
        """The states before all pieces, [pieces, H, K, V]; `final` gets those after the sequences.
        Backward, with k = q and v = dO: the gradients after all pieces and before the sequences."""
        H, K, V = k.shape[2], k.shape[3], v.shape[3]
        pieces, p, decay = self.pieces, self.p, self.fade is not None
        sums = final.new_empty(pieces.number, H, K, V)
        whole = final.new_empty(pieces.number, H) if decay else None
        sizes = self.sizes(k, v, p.sum_columns)
        launch(
            sum_kernel,
            pieces.number * H * sizes["NV"],
            (k, v, self.fade, sums, whole, *self.places(pieces), scale),
            sizes | {"STEP": pieces.step, "DECAY": decay, "BACKWARD": backward, "STAGES": 3},
            warps=p.sum_warps,
        )
        sequences, block = final.shape[0], 512
        blocks = -(-K * V // block)
        flags = {
            "PACKED": pieces.first is not None,
            "DECAY": decay,
            "INITIAL": initial is not None,
            "BACKWARD": backward,
        }
        launch(
            prefix_kernel,
            sequences * H * blocks,
            (sums, whole, initial, final, pieces.first, pieces.each),
            {"H": H, "N": K * V, "BLOCK": block, "BLOCKS": blocks} | flags,
            warps=4,
        )
        return sums


class Walk(NamedTuple):
    """One scan: what takes the places of queries, keys and values, and which way it goes."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    transposed: bool = False
    """Whether the state in memory is [V, K] for these keys and values."""
    backward: bool = False
    other: Tensor | None = None
    share: Tensor | None = None
    """The products of the outputs and `other`, in as many parts as programs share the columns."""
    through: Tensor | None = None
    """The sums over chunks of what comes from the state in these."""
    kept: Tensor | None = None
    """The states before all of `kept_pieces`, of EXACT tokens; backward it is read."""
    kept_pieces: Pieces | None = None
    product: Tensor | None = None
    """Backward: the products of these states and their gradients."""
    causal: bool = True

    def launch(self, call: Call, initial: Tensor | None, final: Tensor | None) -> None:
        """The outputs of all pieces, and the states at their other ends if `final` is given."""
        K, V = self.q.shape[3], self.v.shape[3]
        sizes, p, kept = call.sizes(self.q, self.v), call.p, self.kept_pieces
        more = {
            "SK": 1 if self.transposed else V,
            "SV": K if self.transposed else 1,
            "STEP": call.pieces.step,
            "DECAY": call.fade is not None,
            "INITIAL": initial is not None,
            "FINAL": final is not None,
            "CAUSAL": self.causal,
            "BACKWARD": self.backward,
            "SHARES": self.other is not None,
            "EVERY": EXACT // p.chunk,
            "STAGES": p.stages,
        }
        tokens = self.q.shape[0] * self.q.shape[1]
        launch(
            scan_kernel,
            call.pieces.number * sizes["H"] * sizes["NV"],
            (
                self.q, self.k, self.v, call.fade, initial, final, self.out, self.other,
                self.share, self.through, self.kept, self.product,
                kept and call.pieces.first_in(kept), kept.each if kept else 0,
                *call.places(call.pieces), call.scale, call.scale if self.backward else 1.0, tokens,
            ),
            sizes | more,
            warps=p.warps,
        )  # fmt: skip


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    last: bool,
    wide: bool,
    p: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs (float32 if `wide`), last states if `last`, and the states before all pieces if
    sequences are cut. Tensors are contiguous."""
    call = Call.of(q, k, v, decay, cu_seqlens, scale, p)
    out = torch.empty_like(v, dtype=torch.float32 if wide else v.dtype)
    final = q.new_empty(call.shape_of_states if last else (0,), dtype=torch.float32)
    states = final.new_empty(0)
    if call.pieces.whole:
        Walk(q, k, v, out).launch(call, initial, final if last else None)
    else:
        end = final if last else final.new_empty(call.shape_of_states)
        states = call.states(k, v, initial, end)
        Walk(q, k, v, out).launch(call, states, None)
    return out, final, states


def run_backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    initial: Tensor | None,
    states: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    p: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, decay and the initial state. Tensors are contiguous, and dO has the
    dtype of q, or float32 where products are computed in it."""
    call = Call.of(q, k, v, decay, cu_seqlens, scale, p)
    dinitial = None if initial is None else torch.empty_like(initial)
    before, after, end = initial, dfinal, dinitial
    if not call.pieces.whole:
        start = dinitial
        if start is None:
            start = q.new_empty(call.shape_of_states, dtype=torch.float32)
        before = states
        after, end = call.states(q, do, dfinal, start, scale=scale, backward=True), None
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    found = None if call.fade is None else _DecayGradient(call)
    of_q, of_k = ({}, {}) if found is None else (found.asked(q, "q"), found.asked(k, "k"))
    Walk(do, v, k, dq, transposed=True, **of_q).launch(call, before, None)
    Walk(v, do, q, dk, transposed=True, backward=True, **of_k).launch(call, after, None)
    Walk(k, q, do, dv, backward=True).launch(call, after, end)
    return dq, dk, dv, None if found is None else found.gradient(), dinitial


def run_everything(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """The non-causal form: outputs, and the states of which all tokens read."""
    call = Call.of(q, k, v, None, cu_seqlens, scale, None)
    out = torch.empty_like(v, dtype=torch.float32 if wide else v.dtype)
    final = q.new_empty(call.shape_of_states, dtype=torch.float32)
    call.states(k, v, initial, final)
    Walk(q, k, v, out, causal=False).launch(call.side_by_side(scale), final, None)
    return out, final


def run_everything_backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    final: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the initial state."""
    call = Call.of(q, k, v, None, cu_seqlens, scale, None)
    Z = torch.empty_like(final)
    call.states(q, do, dfinal, Z, scale=scale, backward=True)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    scaled, plain = call.side_by_side(scale), call.side_by_side(1.0)
    Walk(do, v, k, dq, transposed=True, causal=False).launch(scaled, final, None)
    Walk(v, do, q, dk, transposed=True, causal=False).launch(plain, Z, None)
    Walk(k, q, do, dv, causal=False).launch(plain, Z, None)
    return dq, dk, dv, Z


class _DecayGradient:
    """What the walks for dQ and dK leave for the gradient of decay, and that gradient."""

    def __init__(self, call: Call) -> None:
        q, v = call.q, call.v
        B, T, H, K = q.shape
        assert call.chunks is not None
        self.call = call
        self.exact = Pieces.of(B, T, call.cu_seqlens, EXACT)
        self.parts = parts = call.sizes(v, q)["NV"]
        self.share, self.through = (
            {name: q.new_empty(shape, dtype=torch.float32) for name in ("q", "k")}
            for shape in ((parts, B * T, H), (call.chunks.number, H, parts))
        )
        self.before = q.new_empty(
            self.exact.number, H, K, v.shape[3], dtype=Arithmetic.of(q).memory
        )
        self.product = q.new_empty(self.exact.number, H, parts, dtype=torch.float32)

    def asked(self, x: Tensor, name: str) -> dict[str, Any]:
        """What a walk is asked to leave: its outputs' products with `x`, and states or <S, Z>."""
        return {
            "other": x,
            "share": self.share[name],
            "through": self.through[name],
            "kept": self.before,
            "kept_pieces": self.exact,
            "product": self.product,
        }

    def gradient(self) -> Tensor:
        """[B, T, H], once the walks are done."""
        call, H = self.call, self.call.q.shape[2]
        out = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
        constants = {
            "H": H,
            "C": call.p.chunk,
            "N": self.parts,
            "STEP": self.exact.step,
            "LIMIT": -24.0 if self.before.dtype == torch.float32 else -9.0,
        }
        launch(
            decay_kernel,
            self.exact.number * H,
            (
                call.fade, self.share["q"], self.share["k"], self.through["q"], self.through["k"],
                self.product, out, *call.places(self.exact), out.shape[0] * out.shape[1],
            ),
            constants,
            warps=2,
        )  # fmt: skip
        return out


@no_type_check
def _compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    causal: bool,
    last: bool,
    wide: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, decay, initial = contiguous(q, k, v, decay, initial)
    if causal:
        return run(q, k, v, decay, initial, cu_seqlens, scale, last, wide)
    return *run_everything(q, k, v, initial, cu_seqlens, scale, wide), q.new_empty(0)


_forward = torch.library.custom_op("rankone::linear_attention_triton", mutates_args=())(_compute)


@_forward.register_fake
@no_type_check
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    causal: bool,
    last: bool,
    wide: bool,
) -> Any:
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = sequences, q.shape[2], q.shape[3], v.shape[3]
    float32 = {"dtype": torch.float32}
    out = v.new_empty(v.shape, dtype=torch.float32 if wide else v.dtype)
    final = q.new_empty(shape if last or not causal else (0,), **float32)
    if not causal:
        return out, final, q.new_empty(0)
    length = plan_of(q, v, sequences).length
    number = 0
    if length is not None:
        T = q.shape[1]
        number = q.shape[0] * -(-T // length) if cu_seqlens is None else T // length + sequences
    return out, final, q.new_empty((number, *shape[1:]) if number else (0,), **float32)


@no_type_check
def _compute_backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    initial: Tensor | None,
    states: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`states` are those before the pieces, or without causality the last ones."""
    q, k, v, decay, initial = contiguous(q, k, v, decay, initial)
    if Arithmetic.of(q).dtype == tl.bfloat16:
        do = do.to(q.dtype)
    do, dfinal = contiguous(do, dfinal)
    if causal:
        found = run_backward(do, dfinal, q, k, v, decay, initial, states, cu_seqlens, scale)
    else:
        *found, Z = run_everything_backward(do, dfinal, q, k, v, states, cu_seqlens, scale)
        found = *found, None, None if initial is None else Z
    none = states.new_empty(0)
    return tuple(none if x is None else x for x in found)


_backward = torch.library.custom_op("rankone::linear_attention_triton_backward", mutates_args=())(
    _compute_backward
)


@_backward.register_fake
@no_type_check
def _(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    initial: Tensor | None,
    states: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    causal: bool,
) -> Any:
    new = states.new_empty
    grads = (x.new_empty(x.shape) for x in (q, k, v))
    ddecay = new(0) if decay is None else new(decay.shape)
    return *grads, ddecay, new(0) if initial is None else new(initial.shape)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, scale, causal, _, _ = inputs
    ctx.save_for_backward(*tensors, output[2] if causal else output[1])
    ctx.scale, ctx.causal = scale, causal


def _autograd(
    ctx: Any, grad: Tensor, grad_final: Tensor | None, _: Any, backward: Any = _backward
) -> Any:
    q, k, v, decay, initial, cu_seqlens, states = ctx.saved_tensors
    if grad_final is not None and grad_final.numel() == 0:
        grad_final = None
    dq, dk, dv, ddecay, dinitial = backward(
        grad, grad_final, q, k, v, decay, initial, states, cu_seqlens, ctx.scale, ctx.causal
    )
    ddecay = None if decay is None else ddecay.to(decay.dtype)
    return dq, dk, dv, ddecay, None if initial is None else dinitial, *[None] * 5


_forward.register_autograd(_autograd, setup_context=_setup)
_eager = eager(_compute, _setup, partial(_autograd, backward=_compute_backward))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    initial: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    *,
    causal: bool,
    last: bool,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs (float32 if `wide`) and, if `last`, the last states; shapes are taken as right."""
    if scale == 0.0:  # the gradient of the states is kept without the scale
        q, scale = q * 0.0, 1.0
    operation = _forward if torch.compiler.is_compiling() else _eager
    output, final, _ = operation(q, k, v, decay, initial, cu_seqlens, scale, causal, last, wide)
    return output, final
