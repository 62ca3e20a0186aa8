"""Small matrix products with one problem a SIMD lane, for numba.

A "lane array" holds W matrices of the same size side by side, [rows, columns, W], so that one
vector instruction works on W problems at once and nothing is wasted on odd sizes such as 11.
`lane_dot` builds the product of two of them as LLVM vector instructions with the accumulators
of a whole row in registers: about 80 % of the peak of one core, where batched products of
11 x 11 matrices through a BLAS reach a few per cent.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, no_type_check

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

Start = Literal["zero", "out", "eye", "twice_symmetric"]


@cache
def lane_count() -> int:
    """Lanes that suit this processor: 16 floats with AVX-512, else 8."""
    return 16 if binding.get_host_cpu_features().get("avx512f") else 8


@cache
@no_type_check
def lane_dot(
    rows: int,
    inner: int,
    columns: int,
    lanes: int,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    shared_a: bool = False,
    shared_b: bool = False,
    start: Start = "zero",
    symmetric: bool = False,
) -> Any:
    """A compiled `dot(a, b, out)`: out[i, j] = start + sum_k a[i, k] b[k, j] in every lane.

    transpose_a, transpose_b: the operand is stored the other way round.
    shared_a, shared_b: the operand has no lane axis and is the same for all lanes.
    start: "zero", "out" (accumulate), "eye" (add the identity), or "twice_symmetric" (add
    out + outᵀ; needs `symmetric`). symmetric: the result is known to be symmetric, so that only
    its lower triangle is computed. Arrays are contiguous; sizes are not checked.
    """

    @intrinsic
    def dot(_context, a, b, out):
        def generate(context, builder, signature, args):
            emit = _Emitter(context, builder, signature.args, args, lanes)

            def row(i):
                width = i + 1 if symmetric else columns
                sums = [emit.start(start, i, j, columns) for j in range(width)]
                for k in range(inner):
                    at = emit.place(k, i, rows) if transpose_a else emit.place(i, k, inner)
                    left = emit.load(0, at, shared_a)
                    for j in range(width):
                        at = emit.place(j, k, inner) if transpose_b else emit.place(k, j, columns)
                        sums[j] = emit.multiply_add(left, emit.load(1, at, shared_b), sums[j])
                for j in range(width):
                    emit.store(sums[j], emit.place(i, j, columns))
                    if symmetric and j != i:
                        emit.store(sums[j], emit.place(j, i, columns))

            if symmetric or start == "eye":  # rows differ: unrolled
                for i in range(rows):
                    row(i)
            else:
                with cgutils.for_range(builder, ir.Constant(emit.integer, rows)) as loop:
                    row(loop.index)
            return context.get_dummy_value()

        return types.void(a, b, out), generate

    return dot


class _Emitter:
    """Writes the loads, stores and arithmetic of one product."""

    @no_type_check
    def __init__(self, context, builder, arrays, values, lanes):
        self.builder, self.lanes = builder, lanes
        self.integer = ir.IntType(64)
        self.scalar = context.get_data_type(arrays[2].dtype)
        self.vector = ir.VectorType(self.scalar, lanes)
        self.align = arrays[2].dtype.bitwidth // 8
        self.pointers = [
            context.make_array(kind)(context, builder, value).data
            for kind, value in zip(arrays, values, strict=True)
        ]

    @no_type_check
    def place(self, row, column, width):
        row = row if isinstance(row, ir.Value) else ir.Constant(self.integer, row)
        column = column if isinstance(column, ir.Value) else ir.Constant(self.integer, column)
        return self.builder.add(self.builder.mul(row, ir.Constant(self.integer, width)), column)

    @no_type_check
    def _address(self, which, place):
        offset = self.builder.mul(place, ir.Constant(self.integer, self.lanes))
        pointer = self.builder.gep(self.pointers[which], [offset])
        return self.builder.bitcast(pointer, self.vector.as_pointer())

    @no_type_check
    def load(self, which, place, shared=False):
        if shared:
            value = self.builder.load(self.builder.gep(self.pointers[which], [place]))
            undefined = ir.Constant(self.vector, ir.Undefined)
            zero = ir.Constant(ir.IntType(32), 0)
            single = self.builder.insert_element(undefined, value, zero)
            mask = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
            return self.builder.shuffle_vector(single, undefined, mask)
        loaded = self.builder.load(self._address(which, place))
        loaded.align = self.align
        return loaded

    @no_type_check
    def store(self, value, place):
        self.builder.store(value, self._address(2, place)).align = self.align

    @no_type_check
    def start(self, start, i, j, width):
        if start == "out":
            return self.load(2, self.place(i, j, width))
        if start == "twice_symmetric":
            lower, upper = (
                self.load(2, self.place(i, j, width)),
                self.load(2, self.place(j, i, width)),
            )
            return self.builder.fadd(lower, upper)
        one = start == "eye" and i == j
        return ir.Constant(self.vector, [ir.Constant(self.scalar, float(one))] * self.lanes)

    @no_type_check
    def multiply_add(self, a, b, c):
        product = self.builder.fmul(a, b, flags=("contract",))
        return self.builder.fadd(product, c, flags=("contract",))
