"""Functions written in LLVM's language: numbers, vectors of them, loops.

An `Emitter` writes one function, in the order in which its methods are called. What it returns is
not a number but the place where one will be when the function runs. Whole numbers are 64 bits wide,
pointers have no type, and places are counted in numbers from a pointer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from llvmlite import binding, ir

WHOLE = ir.IntType(64)
POINTER = ir.PointerType()
_HALF = ir.IntType(32)
_FUSED = ("contract",)
"""A product and a sum may become one instruction; nothing else changes what is computed."""


@cache
def processor() -> tuple[str, str]:
    """This processor's name and features, as LLVM takes them; nothing where it knows neither."""
    try:
        return binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    except RuntimeError:
        return "", ""


@cache
def registers() -> tuple[int, int]:
    """Bits of this processor's vectors, and how many of them it holds."""
    return (512, 32) if "+avx512f" in processor()[1].split(",") else (256, 16)


def lanes_of(bits: int) -> int:
    """Lanes of a vector of numbers with so many bits."""
    return registers()[0] // bits


class Unit(NamedTuple):
    """Some functions that know each other, for numbers of so many bits."""

    module: Any
    bits: int

    @classmethod
    def new(cls, bits: int) -> Unit:
        """Without functions yet."""
        module = ir.Module("walk")
        module.triple = binding.get_default_triple()
        return cls(module, bits)

    def function(self, name: str, kinds: str, *, public: bool = False) -> Emitter:
        """A new function; `kinds` has a letter for each argument: p a pointer, w a whole number."""
        types = [POINTER if kind == "p" else WHOLE for kind in kinds]
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), types), name)
        if not public:
            function.linkage = "internal"
            function.attributes.add("noinline")
        return Emitter(function, self.bits)


class Emitter:
    """Writes one function."""

    def __init__(self, function: Any, bits: int) -> None:
        self.function, self.arguments = function, function.args
        self.number = ir.FloatType() if bits == 32 else ir.DoubleType()
        self.bytes, self.lanes = bits // 8, lanes_of(bits)
        self.vector = ir.VectorType(self.number, self.lanes)
        self._entry = function.append_basic_block("entry")
        self.b = ir.IRBuilder(function.append_basic_block("body"))

    def finish(self) -> Any:
        """The end of the function; what can be called."""
        self.b.ret_void()
        ir.IRBuilder(self._entry).branch(self.function.basic_blocks[1])
        return self.function

    # Whole numbers and pointers.

    def whole(self, x: Any) -> Any:
        """A constant, or what is whole already."""
        return ir.Constant(WHOLE, x) if isinstance(x, int) else x

    def sum(self, *parts: Any) -> Any:
        """Of whole numbers."""
        total = self.whole(0)
        for part in parts:
            total = self.b.add(total, self.whole(part))
        return total

    def product(self, a: Any, b: Any) -> Any:
        """Of whole numbers."""
        return self.b.mul(self.whole(a), self.whole(b))

    def at(self, pointer: Any, *parts: Any) -> Any:
        """The pointer so many numbers further."""
        return self.b.gep(pointer, [self.sum(*parts)], source_etype=self.number)

    def field(self, pointer: Any, n: Any, kind: Any = WHOLE) -> Any:
        """Entry n of a table of whole numbers or pointers."""
        place = self.b.gep(pointer, [self.whole(n)], source_etype=WHOLE)
        return self.b.load(place, typ=kind)

    def set_field(self, pointer: Any, n: Any, x: Any) -> None:
        """Entry n of a table becomes a pointer or a whole number."""
        self.b.store(x, self.b.gep(pointer, [self.whole(n)], source_etype=WHOLE))

    def room(self, size: int, kind: Any = None) -> Any:
        """Memory for `size` numbers, or things of another kind, while the function runs."""
        entry = ir.IRBuilder(self._entry)
        found = entry.alloca(kind or self.number, self.whole(size))
        found.align = 64
        return found

    # Numbers.

    def constant(self, x: float) -> Any:
        """A number."""
        return ir.Constant(self.number, x)

    def get(self, pointer: Any, *parts: Any) -> Any:
        """The number at a place."""
        return self.b.load(self.at(pointer, *parts), typ=self.number)

    def put(self, x: Any, pointer: Any, *parts: Any) -> None:
        """A number to a place."""
        self.b.store(x, self.at(pointer, *parts))

    # Vectors; the arithmetic is that of numbers too.

    def load(self, pointer: Any, *parts: Any) -> Any:
        """The vector that begins at a place."""
        found = self.b.load(self.at(pointer, *parts), typ=self.vector)
        found.align = self.bytes
        return found

    def store(self, x: Any, pointer: Any, *parts: Any) -> None:
        """A vector to a place."""
        self.b.store(x, self.at(pointer, *parts)).align = self.bytes

    def splat(self, pointer: Any, *parts: Any) -> Any:
        """The number at a place in all lanes."""
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = ir.Constant(_HALF, 0)
        single = self.b.insert_element(undefined, self.get(pointer, *parts), first)
        return self.b.shuffle_vector(single, undefined, self._pick([0] * self.lanes))

    @property
    def zero(self) -> Any:
        """A vector of zeros."""
        return ir.Constant(self.vector, [self.constant(0.0)] * self.lanes)

    def times(self, a: Any, b: Any) -> Any:
        """a b."""
        return self.b.fmul(a, b, flags=_FUSED)

    def plus(self, c: Any, a: Any, b: Any) -> Any:
        """c + a b."""
        return self.b.fadd(c, self.times(a, b), flags=_FUSED)

    def minus(self, c: Any, a: Any, b: Any) -> Any:
        """c - a b."""
        return self.b.fsub(c, self.times(a, b), flags=_FUSED)

    def lane_sums(self, vectors: Sequence[Any]) -> Any:
        """One vector: in lane n the sum of the lanes of vector n, of as many as there are lanes.

        Two vectors become one that holds the half sums of both, and so on.
        """
        vectors, block = list(vectors), self.lanes
        while block > 1:
            half, block = len(vectors) // 2, block // 2
            lows = [
                lane + source
                for start in range(0, self.lanes, 2 * block)
                for source in (0, self.lanes)
                for lane in range(start, start + block)
            ]
            low, high = (self._pick([n + more for n in lows]) for more in (0, block))
            vectors = [
                self.b.fadd(self.b.shuffle_vector(x, y, low), self.b.shuffle_vector(x, y, high))
                for x, y in zip(vectors[:half], vectors[half:], strict=True)
            ]
        return vectors[0]

    def store_lane_sums(self, vectors: Sequence[Any], pointer: Any, first: int) -> None:
        """The sums of the lanes of some vectors, one after another; zeros follow until the last
        vector of sums is full."""
        vectors = [*vectors, *[self.zero] * (-len(vectors) % self.lanes)]
        for n in range(0, len(vectors), self.lanes):
            self.store(self.lane_sums(vectors[n : n + self.lanes]), pointer, first + n)

    def _pick(self, lanes: Sequence[int]) -> Any:
        return ir.Constant(ir.VectorType(_HALF, len(lanes)), list(lanes))

    # Vectors that change.

    def variables(self, number: int) -> list[Any]:
        """Places for vectors that are zeros at first."""
        entry = ir.IRBuilder(self._entry)
        found = [entry.alloca(self.vector) for _ in range(number)]
        for variable in found:
            self.b.store(self.zero, variable)
        return found

    def value(self, variable: Any) -> Any:
        """What a variable is now."""
        return self.b.load(variable, typ=self.vector)

    def add_to(self, variable: Any, a: Any, b: Any) -> None:
        """A variable grows by a b."""
        self.b.store(self.plus(self.value(variable), a, b), variable)

    def subtract_from(self, variable: Any, a: Any, b: Any) -> None:
        """A variable shrinks by a b."""
        self.b.store(self.minus(self.value(variable), a, b), variable)

    # What happens when.

    @contextmanager
    def loop(self, start: Any, end: Any, step: int = 1) -> Iterator[Any]:
        """Counts from start, while it is less than the end."""
        start, end = self.whole(start), self.whole(end)
        before = self.b.block
        body, after = (self.function.append_basic_block(name) for name in ("loop", "then"))
        self.b.cbranch(self.b.icmp_signed("<", start, end), body, after)
        self.b.position_at_end(body)
        count = self.b.phi(WHOLE)
        count.add_incoming(start, before)
        yield count
        following = self.sum(count, step)
        count.add_incoming(following, self.b.block)
        self.b.cbranch(self.b.icmp_signed("<", following, end), body, after)
        self.b.position_at_end(after)

    @contextmanager
    def backward_loop(self, number: Any) -> Iterator[Any]:
        """Counts from number - 1 down to 0."""
        with self.loop(0, number) as n:
            yield self.b.sub(self.b.sub(self.whole(number), n), self.whole(1))

    @contextmanager
    def forever(self) -> Iterator[Any]:
        """A loop that `leave` ends; what it gives is what `leave` takes."""
        body, after = (self.function.append_basic_block(name) for name in ("again", "done"))
        self.b.branch(body)
        self.b.position_at_end(body)
        yield after
        self.b.branch(body)
        self.b.position_at_end(after)

    def leave(self, loop: Any, condition: Any) -> None:
        """The end of a loop, if a condition holds."""
        on = self.function.append_basic_block("on")
        self.b.cbranch(condition, loop, on)
        self.b.position_at_end(on)

    def blocks_of_columns(self, number: Any, most: int) -> Iterator[tuple[Any, list[int]]]:
        """Loops over the columns of a matrix, `most` vectors at a time, then half as many, …: where
        a block begins and how far from there its vectors lie. What is done inside is written once
        for every size."""
        done: Any = self.whole(0)
        width = most
        while width:
            size = width * self.lanes
            rest = self.b.srem(self.b.sub(number, done), self.whole(size))
            end = self.b.sub(number, rest)
            with self.loop(done, end, size) as j:
                yield j, [n * self.lanes for n in range(width)]
            done, width = end, width // 2

    def either(self, condition: Any, one: Any, other: Any) -> Any:
        """One value if a condition holds, and the other if not."""
        return self.b.select(condition, one, other)

    def is_null(self, pointer: Any) -> Any:
        """Whether a pointer leads nowhere."""
        return self.b.icmp_unsigned("==", pointer, ir.Constant(POINTER, None))

    def copy(self, source: Any, target: Any, size: Any) -> None:
        """`size` numbers, a multiple of the lanes, from one place to another."""
        with self.loop(0, size, self.lanes) as n:
            self.store(self.load(source, n), target, n)

    def take_number(self, pointer: Any, n: int) -> Any:
        """Entry n of a table that threads share, which is one more for the next to ask."""
        place = self.b.gep(pointer, [self.whole(n)], source_etype=WHOLE)
        return self.b.atomic_rmw("add", place, self.whole(1), "monotonic")

    def prefetch(self, pointer: Any, size: Any) -> None:
        """Asks for `size` numbers before they are needed: the rows of a head's tokens lie too far
        apart for the processor to guess."""
        types = [POINTER, _HALF, _HALF, _HALF]
        name = "llvm.prefetch.p0"
        ask = self.function.module.globals.get(name)
        if ask is None:
            ask = ir.Function(self.function.module, ir.FunctionType(ir.VoidType(), types), name)
        with self.loop(0, size, 64 // self.bytes) as n:
            self.b.call(ask, [self.at(pointer, n), *(ir.Constant(_HALF, x) for x in (0, 3, 1))])
