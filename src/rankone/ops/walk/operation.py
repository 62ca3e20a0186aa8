"""The compiled walks as an operation with a gradient.

Nothing is written but the output and the states before segments, from which the backward walks the
segments once more before it walks them back.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, NamedTuple, no_type_check

import torch
from torch import Tensor

from rankone.ops.arguments import state_dtype
from rankone.ops.fused import eager, needs_gradient
from rankone.ops.walk.emitter import lanes_of
from rankone.ops.walk.machine import large_pages
from rankone.ops.walk.steps import TOKENS, Kind, Rows
from rankone.ops.walk.tracks import SIZE, Field, Scalars, kernel, room_size


class Call(NamedTuple):
    """The tensors of a call; `beta` is None for linear attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    decay: Tensor | None
    scale: float

    def kind(self, dtype: torch.dtype) -> Kind:
        """Which walk it is, with states in a dtype."""
        return Kind(self.beta is not None, self.decay is not None, 8 * dtype.itemsize)


@no_type_check  # sizes are symbols where shapes are
def segment_of(K: int, V: int) -> int:
    """Tokens between two states that the forward keeps: the states are no more than an eighth of
    q, k, v and the output."""
    return TOKENS * -(-max(128, 2 * K, 2 * V) // TOKENS)


@no_type_check
def padded(size: int, dtype: torch.dtype) -> int:
    """A multiple of the lanes of a vector."""
    lanes = lanes_of(8 * dtype.itemsize)
    return -(-size // lanes) * lanes


def walk(
    call: Call, initial: Tensor | None, cu_seqlens: Tensor | None, *, last: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, last states if asked for, and if `keep` the states before all segments but the
    first; all in the dtype of states."""
    run = _Run(call, cu_seqlens, backward=False)
    output = run.room_for(Rows.OUT, call.v)
    run.walk_from(initial)
    final = run.states() if last else None
    slots = _slots(call, cu_seqlens) if keep else 0
    starts = large_pages(output.new_empty(slots, run.H, run.K * run.V))
    run.go("forward", starts)
    return _cut(output, call.v.shape[3]), run.cut_states(final), starts


def walk_back(
    call: Call,
    initial: Tensor | None,
    starts: Tensor,
    grad: Tensor,
    grad_final: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, beta, decay and the initial states; empty where there is none."""
    run = _Run(call, cu_seqlens, backward=True)
    run.give(Rows.DO, run.rows(grad))
    grads = [run.room_for(getattr(Rows, f"D{x}"), getattr(call, x.lower())) for x in "QKV"]
    scalars = [
        starts.new_empty(0) if x is None else run.give(which, starts.new_empty(x.shape))
        for which, x in ((Rows.DBETA, call.beta), (Rows.DDECAY, call.decay))
    ]
    run.walk_from(grad_final)
    run.point(Field.FIRST, run.padded_states(initial))
    first = None if initial is None else run.states()
    run.go("backward", starts)
    dq, dk, dv = (_cut(x, y.shape[3]) for x, y in zip(grads, call[:3], strict=True))
    return dq, dk, dv, *scalars, run.cut_states(first)


class _Run:
    """One run of a kernel: its table, and the tensors that the table points to."""

    def __init__(self, call: Call, cu_seqlens: Tensor | None, *, backward: bool) -> None:
        self.dtype = state_dtype(call.q.dtype)
        self.kind = call.kind(self.dtype)
        self.like = call.q.new_empty(0, dtype=self.dtype)
        _, _, self.H, K = call.q.shape
        V = call.v.shape[3]
        self.given = K, V
        self.K, self.V = padded(K, self.dtype), padded(V, self.dtype)
        self.table = [0] * SIZE
        self.kept: list[Tensor] = []  # what the table points to must not go away
        for which, x in ((Rows.Q, call.q), (Rows.K, call.k), (Rows.V, call.v)):
            self.give(which, self.rows(x))
        if call.beta is not None:
            self.give(Scalars.BETA, call.beta.detach().to(self.dtype))
        if call.decay is not None:
            self.give(Scalars.LEFT, call.decay.detach().to(self.dtype).exp())
        segment = segment_of(K, V)
        sequences = torch.tensor(_sequences(call.q, cu_seqlens, segment))
        self.sequences, self.tracks = len(sequences), len(sequences) * self.H
        sizes = {
            Field.TRACKS: self.tracks,
            Field.HEADS: self.H,
            Field.KEYS: self.K,
            Field.VALUES: self.V,
            Field.SEGMENT: segment,
            Field.ROOM_SIZE: room_size(self.kind, self.K, self.V, segment, backward=backward),
        }
        for field, size in sizes.items():
            self.table[field] = size
        self.point(Field.SEQUENCES, sequences)
        self.point(Field.SCALE, torch.tensor(call.scale, dtype=self.dtype))

    def walk_from(self, states: Tensor | None) -> None:
        """The states that the walk begins with; None for zeros."""
        self.point(Field.FROM, self.padded_states(states))

    def states(self) -> Tensor:
        """A place for the states at the other end."""
        shape = self.sequences, self.H, self.K, self.V
        states = large_pages(self.like.new_empty(shape))
        self.point(Field.TO, states)
        return states

    def padded_states(self, states: Tensor | None) -> Tensor | None:
        """States [N, H, K, V] as kernels read them."""
        if states is None:
            return None
        K, V = self.given
        states = states.detach()
        if (self.K, self.V) != (K, V):
            return torch.nn.functional.pad(states, (0, self.V - V, 0, self.K - K))
        return states.contiguous()

    def cut_states(self, states: Tensor | None) -> Tensor:
        """States as they were asked for; nothing for None."""
        K, V = self.given
        return self.like.new_empty(0) if states is None else _cut(states[:, :, :K], V)

    def rows(self, x: Tensor) -> Tensor:
        """A tensor [B, T, H, …] as kernels read it: whole vectors that lie together."""
        x = x.detach().to(self.dtype)
        missing = padded(x.shape[3], self.dtype) - x.shape[3]
        if missing:
            return torch.nn.functional.pad(x, (0, missing))
        return x if x.stride(3) == 1 else x.contiguous()

    def give(self, which: int, x: Tensor) -> Tensor:
        """A tensor [B, T, H] or [B, T, H, …] has its place in the table."""
        first = Field.TENSORS + 4 * which
        self.point(first, x)
        self.table[first + 1 : first + 4] = x.stride()[:3]
        return x

    def room_for(self, which: Rows, like: Tensor) -> Tensor:
        """A new tensor for what is found, like another one but for whole vectors."""
        shape = *like.shape[:3], padded(like.shape[3], self.dtype)
        return self.give(which, large_pages(self.like.new_empty(shape)))

    def point(self, field: int, x: Tensor | None) -> None:
        """An entry of the table is where a tensor is, if there is one."""
        if x is not None:
            self.kept.append(x)
            self.table[field] = x.data_ptr()

    def go(self, name: str, starts: Tensor) -> None:
        """Runs the kernel."""
        self.point(Field.STARTS, starts)
        threads = min(torch.get_num_threads(), self.tracks)
        room = self.like.new_empty(threads * self.table[Field.ROOM_SIZE])
        self.point(Field.ROOM, large_pages(room))
        table = torch.tensor(self.table)
        kernel(name, self.kind).run(table.data_ptr(), threads)


def _cut(x: Tensor, size: int) -> Tensor:
    """Without the columns that fill vectors."""
    return x[..., :size].contiguous()


@no_type_check  # sizes are symbols where shapes are
def _slots(call: Call, cu_seqlens: Tensor | None) -> Any:
    """How many states are kept; of packed sequences as many as could be needed."""
    (batch, length, _, K), V = call.q.shape, call.v.shape[3]
    segment = segment_of(K, V)
    return batch * (-(-length // segment) - 1) if cu_seqlens is None else length // segment


def _sequences(q: Tensor, cu_seqlens: Tensor | None, segment: int) -> list[tuple[int, ...]]:
    """Each one's row, where it begins and ends there, and the place of its first kept state."""
    batch, length = q.shape[:2]
    if cu_seqlens is None:
        return [(b, 0, length, b * (-(-length // segment) - 1)) for b in range(batch)]
    bounds = itertools.pairwise(cu_seqlens.tolist())
    return [(0, begin, end, begin // segment) for begin, end in bounds]


@no_type_check
def _compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    decay: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    last: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return walk(Call(q, k, v, beta, decay, scale), initial, cu_seqlens, last=last, keep=keep)


_forward = torch.library.custom_op("rankone::walk", mutates_args=())(_compute)


@_forward.register_fake
@no_type_check
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    decay: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    last: bool,
    keep: bool,
) -> Any:
    call, dtype = Call(q, k, v, beta, decay, scale), state_dtype(q.dtype)
    H, K, V = q.shape[2], q.shape[3], v.shape[3]
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    slots = _slots(call, cu_seqlens) if keep else 0
    starts = slots, H, padded(K, dtype) * padded(V, dtype)
    shapes = v.shape, (sequences, H, K, V) if last else (0,), starts
    return tuple(v.new_empty(shape, dtype=dtype) for shape in shapes)


@no_type_check
def _compute_backward(
    grad: Tensor,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    decay: Tensor | None,
    initial: Tensor | None,
    starts: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = Call(q, k, v, beta, decay, scale)
    return walk_back(call, initial, starts, grad, grad_final, cu_seqlens)


_backward = torch.library.custom_op("rankone::walk_backward", mutates_args=())(_compute_backward)


@_backward.register_fake
@no_type_check
def _(
    grad: Tensor,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    decay: Tensor | None,
    initial: Tensor | None,
    starts: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> Any:
    given = (q, k, v, beta, decay, initial)
    return tuple(starts.new_empty(0 if x is None else x.shape) for x in given)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, cu_seqlens, scale, _, _ = inputs
    ctx.save_for_backward(*tensors, output[2], cu_seqlens)
    ctx.scale = scale


def _autograd(
    ctx: Any, grad: Tensor, grad_final: Tensor | None, _: Any, backward: Any = _backward
) -> Any:
    *given, starts, cu_seqlens = ctx.saved_tensors
    if grad_final is not None and grad_final.numel() == 0:
        grad_final = None
    found = backward(grad, grad_final, *given, starts, cu_seqlens, ctx.scale)
    own = [None if x is None else g.to(x.dtype) for g, x in zip(found, given, strict=True)]
    return *own, *[None] * 4


_forward.register_autograd(_autograd, setup_context=_setup)
_eager = eager(_compute, _setup, partial(_autograd, backward=_compute_backward))


def forward(
    call: Call, initial: Tensor | None, cu_seqlens: Tensor | None, *, last: bool
) -> tuple[Tensor, Tensor]:
    """Outputs and, if `last`, the last states, in the state's dtype; shapes are taken as right."""
    *tensors, scale = call
    keep = needs_gradient(*tensors, initial)
    operation = _forward if torch.compiler.is_compiling() else _eager
    output, final, _ = operation(*tensors, initial, cu_seqlens, scale, last, keep)
    return output, final
