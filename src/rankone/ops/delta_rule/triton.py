# mypy: disallow-untyped-calls=False
"""The delta rule in fused GPU kernels: how a call is laid out and launched, and its gradient.

The kernels and their equations are in `kernels`; docs/kernels.md tells how they were chosen.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, no_type_check

import torch
import triton.language as tl
from torch import Tensor

from rankone.ops.delta_rule.kernels import (
    local_kernel,
    reverse_kernel,
    scan_kernel,
    solve_kernel,
)
from rankone.ops.delta_rule.transfer import combine_kernel, transfer_kernel
from rankone.ops.fused import contiguous, eager, needs_gradient
from rankone.ops.launch import launch
from rankone.ops.tiles import Arithmetic, Pieces, fades, padded, processors_of, tile

EXACT = 1024
"""Tokens between two states that the forward keeps for the backward."""
SHORTEST = 2 * EXACT
"""Tokens of a piece at least; a multiple of EXACT."""
LARGEST = 128
"""K up to which sequences are cut into pieces: Φ is held on the chip."""


class Plan(NamedTuple):
    """How a call is laid out on the device; results differ only by rounding."""

    chunk: int
    """Tokens of a chunk."""
    columns: int
    """Columns of the values that a program of the two walks has."""
    warps: int
    stages: int
    length: int | None
    """Tokens of a piece; None for whole sequences."""
    transfer_registers: int | None
    """Registers of a thread that leave room for more programs at a time, like `solve_registers` and
    `local_registers`."""
    solve_warps: int
    wide: int
    """Columns of the values that a program of the recomputation has."""
    wide_stages: int
    local: int
    """Columns of the keys that a program of the local gradients has."""
    local_wide: int
    """Columns of the values that it takes at a time."""
    local_warps: int
    local_registers: int | None
    solve_registers: int | None


@no_type_check  # sizes are symbols where shapes are
def plan(
    arithmetic: Arithmetic, sequences: int, tokens: int, heads: int, keys: int, values: int,
    processors: int,
) -> Plan:  # fmt: skip
    """The layout for a call with `tokens` tokens in all."""
    BK, BV = padded(keys), padded(values)
    chunk, wide, warps = tile(arithmetic, keys, values)
    wide = columns = min(BV, wide)
    programs = heads * -(-values // wide)
    length = None
    if sequences * programs < 0.9 * processors and BK <= LARGEST:
        pieces = max(1, 2 * processors // programs)
        length = max(SHORTEST, -(-tokens // (pieces * EXACT)) * EXACT)
        length = None if tokens < 2 * length * sequences else length
    if length is None:
        while columns > 16 and sequences * heads * -(-values // columns) < 0.9 * processors:
            columns //= 2
    full = length is not None or sequences * heads * -(-values // columns) > processors
    large = chunk == 64  # tiles that fill the tensor cores
    return Plan(
        chunk=chunk,
        columns=columns,
        warps=warps,
        stages=2 if full else 3,
        length=length,
        transfer_registers=None,
        solve_warps=4,
        solve_registers=168 if large else None,
        wide=wide,
        wide_stages=3,
        local=min(BK, 128 if large else 32),
        local_wide=min(BV, 64 if large else 32),
        local_warps=8 if large else 4,
        local_registers=None,
    )


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
    beta: Tensor
    fade: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    p: Plan
    chunks: Pieces

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None,
        cu_seqlens: Tensor | None, scale: float, p: Plan | None,
    ) -> Call:  # fmt: skip
        """The call with its plan, and with running sums of decay."""
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        p = p or plan_of(q, v, sequences)
        chunks = Pieces.of(q.shape[0], q.shape[1], cu_seqlens, p.chunk)
        fade = None if decay is None else fades(decay, chunks)
        return cls(q, k, v, beta, fade, cu_seqlens, scale, p, chunks)

    @property
    def sequences(self) -> int:
        """How many there are."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def pieces(self, length: int | None) -> Pieces:
        """Pieces of `length` tokens, or whole sequences."""
        return Pieces.of(self.q.shape[0], self.q.shape[1], self.cu_seqlens, length)

    def sizes(self, columns: int) -> dict[str, Any]:
        """Constants of a kernel that has `columns` columns of the values at a time."""
        arithmetic = Arithmetic.of(self.q)
        K, V = self.q.shape[3], self.v.shape[3]
        columns = min(columns, padded(V))
        return {
            "H": self.q.shape[2],
            "K": K,
            "V": V,
            "C": self.p.chunk,
            "BK": padded(K),
            "BV": columns,
            "NV": -(-V // columns),
            "DECAY": self.fade is not None,
            "DT": arithmetic.dtype,
            "PRECISION": arithmetic.precision,
        }

    def memory(self, *shape: int) -> Tensor:
        """Room for what is kept between kernels."""
        return self.q.new_empty(shape, dtype=Arithmetic.of(self.q).memory)

    def solve(self) -> Tensor:
        """T - I of all chunks, [B, T, H, C]."""
        out = self.memory(*self.q.shape[:3], self.p.chunk)
        sizes = self.sizes(16)
        for name in ("V", "BV", "NV"):
            del sizes[name]
        launch(
            solve_kernel,
            self.chunks.number * sizes["H"],
            (self.k, self.beta, self.fade, out, *self.chunks.arguments),
            sizes | {"STEP": self.chunks.step},
            warps=self.p.solve_warps,
            registers=self.p.solve_registers,
        )
        return out

    def scan(
        self, solve: Tensor, initial: Tensor | None, final: Tensor | None, pieces: Pieces, *,
        out: Tensor | None = None, check: Tensor | None = None, right: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Outputs, with the states in `check`; or R and the states before all chunks."""
        columns = self.p.columns if right is None else self.p.wide
        sizes = self.sizes(columns)
        exact = self.pieces(EXACT)
        checks = None if check is None else pieces.first_in(exact)
        flags = {
            "STEP": pieces.step,
            "INITIAL": initial is not None,
            "FINAL": final is not None,
            "OUT": out is not None,
            "CHECK": check is not None,
            "EVERY": EXACT // self.p.chunk,
            "SPLIT": sizes["DT"] == tl.bfloat16 and sizes["BK"] <= 64,
            "STAGES": self.p.stages if right is None else self.p.wide_stages,
        }
        launch(
            scan_kernel,
            pieces.number * sizes["H"] * sizes["NV"],
            (
                self.q, self.k, self.v, self.beta, self.fade, solve, initial, final, out, right,
                kept, pieces.first_in(self.chunks), check, checks, *pieces.arguments, self.scale,
                self.chunks.each, exact.each,
            ),
            sizes | flags,
            warps=self.p.warps,
        )  # fmt: skip

    def reverse(
        self, solve: Tensor, do: Tensor, start: Tensor | None, end: Tensor | None, pieces: Pieces,
        *, dv: Tensor | None = None, kept: Tensor | None = None,
    ) -> None:  # fmt: skip
        """The gradient of the state before pieces from that after them; with dV also that after all
        chunks."""
        sizes = self.sizes(self.p.columns)
        flags = {
            "STEP": pieces.step,
            "INITIAL": start is not None,
            "FINAL": end is not None,
            "OUT": dv is not None,
            "STAGES": self.p.stages,
        }
        launch(
            reverse_kernel,
            pieces.number * sizes["H"] * sizes["NV"],
            (
                self.q, self.k, self.beta, self.fade, solve, do, start, end, dv, kept,
                pieces.first_in(self.chunks), *pieces.arguments, self.scale, self.chunks.each,
            ),
            sizes | flags,
            warps=self.p.warps,
        )  # fmt: skip

    def transfer(self, solve: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
        """What all pieces add to the state, [pieces, H, K, V], and Φ, [pieces, H, K, K]."""
        H, K, V = self.q.shape[2], self.q.shape[3], self.v.shape[3]
        sizes = self.sizes(self.p.columns)
        parts = -(-K // sizes["BV"])
        added, turned = (
            self.q.new_empty(pieces.number, H, K, size, dtype=torch.float32) for size in (V, K)
        )
        launch(
            transfer_kernel,
            pieces.number * H * (sizes["NV"] + parts),
            (
                self.k, self.v, self.beta, self.fade, solve, added, turned,
                pieces.first_in(self.chunks), *pieces.arguments, self.chunks.each,
            ),
            sizes | {"NK": parts, "STEP": pieces.step, "STAGES": self.p.stages},
            warps=self.p.warps,
            registers=self.p.transfer_registers,
        )  # fmt: skip
        return added, turned

    def combine(
        self, added: Tensor, turned: Tensor, start: Tensor | None, end: Tensor | None,
        pieces: Pieces, *, backward: bool = False,
    ) -> None:  # fmt: skip
        """What pieces add becomes the states before them, and `end` gets the last ones; backward
        the gradients after them, and `end` those of the initial states."""
        H, K, V = self.q.shape[2], self.q.shape[3], self.v.shape[3]
        columns = 16
        parts = -(-V // columns)
        constants = {
            "H": H,
            "K": K,
            "V": V,
            "BK": padded(K),
            "BV": columns,
            "NV": parts,
            "PACKED": pieces.first is not None,
            "INITIAL": start is not None,
            "FINAL": end is not None,
            "BACKWARD": backward,
        }
        launch(
            combine_kernel,
            self.sequences * H * parts,
            (added, turned, start, end, pieces.first, pieces.each),
            constants,
            warps=8,
        )


def run(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None, initial: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, last: bool, keep: bool, p: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Outputs, last states if `last`, and if `keep` T - I, the states every EXACT tokens, and Φ of
    all pieces if sequences are cut."""
    call = Call.of(q, k, v, beta, decay, cu_seqlens, scale, p)
    H, K, V = q.shape[2], q.shape[3], v.shape[3]
    out = torch.empty_like(v)
    final = q.new_empty((call.sequences, H, K, V) if last else (0,), dtype=torch.float32)
    check = final.new_empty((call.pieces(EXACT).number, H, K, V) if keep else (0,))
    turned = final.new_empty(0)
    solve = call.solve()
    pieces, start, end = call.pieces(call.p.length), initial, final if last else None
    if not pieces.whole:
        start, turned = call.transfer(solve, pieces)
        call.combine(start, turned, initial, end, pieces)
        end = None
    call.scan(solve, start, end, pieces, out=out, check=check if keep else None)
    if not keep:
        solve, turned = solve.new_empty(0), turned.new_empty(0)
    return out, final, solve, check, turned


def run_backward(
    do: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, beta: Tensor,
    decay: Tensor | None, initial: Tensor | None, solve: Tensor, check: Tensor, turned: Tensor,
    cu_seqlens: Tensor | None, scale: float, p: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of q, k, v, beta, decay and the initial state."""
    call = Call.of(q, k, v, beta, decay, cu_seqlens, scale, p)
    H, K, V = q.shape[2], q.shape[3], v.shape[3]
    chunks, pieces = call.chunks, call.pieces(call.p.length)
    right = call.memory(*v.shape)
    before, after = call.memory(chunks.number, H, K, V), call.memory(chunks.number, H, K, V)
    call.scan(solve, check, None, call.pieces(EXACT), right=right, kept=before)

    dv = torch.empty_like(v)
    dinitial = None if initial is None else torch.empty_like(initial)
    start, end = dfinal, dinitial
    if not pieces.whole:
        start = check.new_empty(pieces.number, H, K, V)
        call.reverse(solve, do, None, start, pieces)
        call.combine(start, turned, dfinal, dinitial, pieces, backward=True)
        end = None
    call.reverse(solve, do, start, end, pieces, dv=dv, kept=after)

    dq, dk = torch.empty_like(q), torch.empty_like(k)
    keys = min(call.p.local, padded(K))
    parts = -(-K // keys)
    dbeta = beta.new_empty(parts, *beta.shape, dtype=torch.float32)
    ddecay = None if call.fade is None else torch.empty_like(dbeta)
    sizes = call.sizes(call.p.local_wide) | {"BK": keys, "NK": parts}
    launch(
        local_kernel,
        chunks.number * H * parts,
        (
            q, k, beta, call.fade, right, do, dv, before, after, dq, dk, dbeta, ddecay,
            *chunks.arguments, scale, q.shape[0] * q.shape[1],
        ),
        sizes | {"STEP": chunks.step, "STAGES": 2},
        warps=call.p.local_warps,
        registers=call.p.local_registers,
    )  # fmt: skip
    return dq, dk, dv, dbeta.sum(0), None if ddecay is None else ddecay.sum(0), dinitial


@no_type_check
def _compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    last: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, beta, decay, initial = contiguous(q, k, v, beta, decay, initial)
    return run(q, k, v, beta, decay, initial, cu_seqlens, scale, last, keep)


_forward = torch.library.custom_op("rankone::delta_rule_triton", mutates_args=())(_compute)


@_forward.register_fake
@no_type_check
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    last: bool,
    keep: bool,
) -> Any:
    B, T, H, K = q.shape
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    p = plan_of(q, v, sequences)

    def pieces(length: int) -> Any:
        return B * -(-T // length) if cu_seqlens is None else T // length + sequences

    def float32(*shape: Any) -> Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    whole = p.length is None or (cu_seqlens is None and p.length >= T)
    return (
        v.new_empty(v.shape),
        float32(sequences, H, K, v.shape[3]) if last else float32(0),
        q.new_empty((B, T, H, p.chunk) if keep else (0,), dtype=Arithmetic.of(q).memory),
        float32(pieces(EXACT), H, K, v.shape[3]) if keep else float32(0),
        float32(0) if whole or not keep else float32(pieces(p.length), H, K, K),
    )


@no_type_check
def _compute_backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    solve: Tensor,
    check: Tensor,
    turned: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, beta, decay, initial = contiguous(q, k, v, beta, decay, initial)
    do, dfinal = contiguous(do.to(q.dtype), dfinal)
    kept = solve, check, turned
    found = run_backward(do, dfinal, q, k, v, beta, decay, initial, *kept, cu_seqlens, scale)
    return tuple(check.new_empty(0) if x is None else x for x in found)


_backward = torch.library.custom_op("rankone::delta_rule_triton_backward", mutates_args=())(
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
    beta: Tensor,
    decay: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    solve: Tensor,
    check: Tensor,
    turned: Tensor,
    scale: float,
) -> Any:
    new = check.new_empty
    grads = (x.new_empty(x.shape) for x in (q, k, v))
    ddecay = new(0) if decay is None else new(decay.shape)
    dinitial = new(0) if initial is None else new(initial.shape)
    return *grads, new(beta.shape), ddecay, dinitial


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, scale, _, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.scale = scale


def _autograd(
    ctx: Any, grad: Tensor, grad_final: Tensor | None, *_: Any, backward: Any = _backward
) -> Any:
    *tensors, solve, check, turned = ctx.saved_tensors
    beta, decay, initial = tensors[3:6]
    if grad_final is not None and grad_final.numel() == 0:
        grad_final = None
    dq, dk, dv, dbeta, ddecay, dinitial = backward(
        grad, grad_final, *tensors, solve, check, turned, ctx.scale
    )
    ddecay = None if decay is None else ddecay.to(decay.dtype)
    dinitial = None if initial is None else dinitial
    return dq, dk, dv, dbeta.to(beta.dtype), ddecay, dinitial, *[None] * 4


_forward.register_autograd(_autograd, setup_context=_setup)
_eager = eager(_compute, _setup, partial(_autograd, backward=_compute_backward))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None,
    initial: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    *,
    last: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs and, if `last`, the last states; shapes are taken as right."""
    if scale == 0.0:  # the gradient of the states is kept without the scale
        q, scale = q * 0.0, 1.0
    keep = needs_gradient(q, k, v, beta, decay, initial)
    operation = _forward if torch.compiler.is_compiling() else _eager
    output, final, *_ = operation(q, k, v, beta, decay, initial, cu_seqlens, scale, last, keep)
    return output, final
