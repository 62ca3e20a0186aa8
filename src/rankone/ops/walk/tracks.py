"""Whole tracks, a track being one head of one sequence: threads take the next one until none is
left, and walk it with the steps of `steps`.

A kernel takes one table of whole numbers, `Field`: counters that threads share, sizes, and where
the tensors are. Tensors have any strides but for their last axis. Tokens beyond the end of a
sequence, which fill its last step, are rows of zeros, and what is found for them goes to a row that
nobody reads.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Any

from rankone.ops.walk import steps
from rankone.ops.walk.emitter import POINTER, WHOLE, Emitter, Unit, lanes_of
from rankone.ops.walk.machine import Compiled
from rankone.ops.walk.steps import TOKENS, Kind, Numbers, Rows

_EACH = range(TOKENS)


class Field(IntEnum):
    """The entries of a kernel's table."""

    NEXT = 0
    """The next track; threads count it up."""
    THREADS = 1
    """How many threads have begun; they count it up."""
    TRACKS = 2
    HEADS = 3
    KEYS = 4
    VALUES = 5
    SEGMENT = 6
    """Tokens between two states that the forward keeps."""
    SEQUENCES = 7
    """Pointer to four whole numbers a sequence: its row, where it begins and ends there, and the
    place of its first kept state, that before its second segment."""
    SCALE = 8
    """Pointer to the scale."""
    FROM = 9
    """Pointer to the states [N, H, K, V] that the walk begins with, null for zeros; backward to the
    gradients of the last states."""
    TO = 10
    """Pointer to the states at the other end, null if nobody wants them; backward to the gradients
    of the initial states."""
    FIRST = 11
    """Backward: pointer to the states that the forward began with, null for zeros."""
    STARTS = 12
    """Pointer to the states before all segments but the first of each sequence, null if nobody
    wants them."""
    ROOM = 13
    """Pointer to the threads' own room, ROOM_SIZE numbers each."""
    ROOM_SIZE = 14
    TENSORS = 15
    """From here on four entries a tensor, in the order of `Rows` and `Scalars`: a pointer, and how
    many numbers further the next row, token and head are."""


class Scalars(IntEnum):
    """Tensors with one number a token and head, after those of `Rows` with many."""

    BETA = 12
    LEFT = 13
    """e^decay."""


TENSORS = 14
SIZE = Field.TENSORS + 4 * TENSORS
_OF_KEYS = (Rows.Q, Rows.K, Rows.DQ, Rows.DK)


def room_size(kind: Kind, K: int, V: int, segment: int, *, backward: bool) -> int:
    """Numbers of a thread's own room: a row of zeros, one that nobody reads and a state; backward
    also the states before all steps of a segment, the rows that the walk there leaves, and what a
    step needs."""
    always = 2 * max(K, V) + K * V
    if not backward:
        return always
    step = 4 * TOKENS * V + 2 * TOKENS * K * lanes_of(kind.bits)
    return always + (segment // TOKENS + 1) * K * V + 2 * segment * V + step


class Track:
    """What both walks have: the table, the track's own pointers, tables of rows and numbers."""

    def __init__(self, unit: Unit, name: str, kind: Kind, rows: tuple[Rows, ...]) -> None:
        self.kind, self.rows = kind, rows
        self.e: Emitter = unit.function(name, "p", public=True)
        (self.fields,) = self.e.arguments
        self.table = self.e.room((max(Rows) + 1) * TOKENS, POINTER)
        self.numbers = self.e.room(Numbers.SIZE)
        self.K, self.V, self.H = (self.of(x) for x in (Field.KEYS, Field.VALUES, Field.HEADS))
        self.segment = self.of(Field.SEGMENT)
        self.states_size = self.e.product(self.K, self.V)

    def of(self, n: int, kind: Any = WHOLE) -> Any:
        """An entry of the kernel's table."""
        return self.e.field(self.fields, n, kind)

    def own_room(self) -> Any:
        """The thread's room, after its row of zeros, the row that nobody reads, and a state."""
        e = self.e
        thread = e.take_number(self.fields, Field.THREADS)
        room = e.at(self.of(Field.ROOM, POINTER), e.product(thread, self.of(Field.ROOM_SIZE)))
        # Rows of K and of V numbers are the larger of the two.
        larger = e.either(e.b.icmp_signed("<", self.K, self.V), self.V, self.K)
        self.zeros, self.nobody = room, e.at(room, larger)
        self.own_state = e.at(self.nobody, larger)
        with e.loop(0, larger, e.lanes) as n:
            e.store(e.zero, self.zeros, n)
        return e.at(self.own_state, self.states_size)

    def enter(self, track: Any) -> None:
        """Where the track's sequence and its tensors are."""
        e = self.e
        sequence, h = e.b.sdiv(track, self.H), e.b.srem(track, self.H)
        sequences = self.of(Field.SEQUENCES, POINTER)
        row, self.begin, self.end, self.slot = (
            e.field(sequences, e.sum(e.product(sequence, 4), n)) for n in range(4)
        )
        self.h, self.place = h, e.product(track, self.states_size)
        to = self.of(Field.TO, POINTER)
        self.state = e.either(e.is_null(to), self.own_state, e.at(to, self.place))
        self.fetch(self.of(Field.FROM, POINTER), self.place, self.state)
        self.tensors = {}
        for which in (*self.rows, *Scalars):
            pointer, by_row, by_token, by_head = self._entries(which)
            start = e.sum(e.product(row, by_row), e.product(h, by_head))
            self.tensors[which] = e.at(pointer, start), by_token

    def fetch(self, pointer: Any, place: Any, state: Any) -> None:
        """A state becomes what is at a place from a pointer on, or zeros for none."""
        e = self.e
        none = e.is_null(pointer)
        zeros = e.either(none, self.states_size, e.whole(0))
        with e.loop(0, zeros, e.lanes) as n:
            e.store(e.zero, state, n)
        e.copy(e.at(pointer, place), state, e.b.sub(self.states_size, zeros))

    def _entries(self, which: int) -> tuple[Any, ...]:
        first = Field.TENSORS + 4 * which
        return self.of(first, POINTER), *(self.of(first + n) for n in range(1, 4))

    def start(self, segment: Any) -> Any:
        """The place among those kept of the state before a segment that is not the first."""
        e = self.e
        place = e.sum(e.product(e.sum(self.slot, segment, -1), self.H), self.h)
        return e.product(place, self.states_size)

    def gather(self, t: Any, written: tuple[Rows, ...]) -> None:
        """The rows and numbers of the tokens from t on."""
        e = self.e
        there = [e.b.icmp_signed("<", e.sum(t, c), self.end) for c in _EACH]
        for which in self.rows:
            pointer, by_token = self.tensors[which]
            missing = self.nobody if which in written else self.zeros
            for c in _EACH:
                row = e.at(pointer, e.product(e.sum(t, c), by_token))
                row = e.either(there[c], row, missing)
                e.set_field(self.table, which * TOKENS + c, row)
        e.put(e.get(self.of(Field.SCALE, POINTER), 0), self.numbers, Numbers.SCALE)
        if self.kind.erases:
            for c in _EACH:
                e.put(
                    self._scalar(Scalars.BETA, t, c, there[c], 0.0), self.numbers, Numbers.BETA + c
                )
        if self.kind.fades:
            self._decays([self._scalar(Scalars.LEFT, t, c, there[c], 1.0) for c in _EACH])

    def _scalar(self, which: Scalars, t: Any, c: int, there: Any, otherwise: float) -> Any:
        """A token's number, or another one where there is no token."""
        e = self.e
        pointer, by_token = self.tensors[which]
        token = e.either(there, e.sum(t, c), t)
        found = e.get(pointer, e.product(token, by_token))
        return e.either(there, found, e.constant(otherwise))

    def _decays(self, left: list[Any]) -> None:
        """What is left between all pairs of tokens, and before and after each."""
        e = self.e
        for a in _EACH:
            x = e.constant(1.0)
            for c in range(a, TOKENS):
                x = e.times(x, left[c]) if c > a else x
                e.put(x, self.numbers, Numbers.BETWEEN + c * TOKENS + a)
            e.put(x, self.numbers, Numbers.UNTIL + a)
        x = left[0]
        for c in _EACH:
            x = e.times(x, left[c]) if c > 0 else x
            e.put(x, self.numbers, Numbers.SINCE + c)

    def ask_for(self, t: Any, *rows: Rows) -> None:
        """Asks for rows of the tokens from t on, or of the next that are as many."""
        e = self.e
        last = e.b.sub(self.end, e.whole(TOKENS))
        t = e.either(e.b.icmp_signed("<", t, last), t, last)
        t = e.either(e.b.icmp_signed("<", t, self.begin), self.begin, t)
        for which in rows:
            pointer, by_token = self.tensors[which]
            size = self.K if which in _OF_KEYS else self.V
            for c in _EACH:
                e.prefetch(e.at(pointer, e.product(e.sum(t, c), by_token)), size)

    def call(self, step: Any, *pointers: Any) -> None:
        """One step."""
        self.e.b.call(step, [*pointers, self.table, self.numbers, self.K, self.V])


def _forward(unit: Unit, kind: Kind) -> None:
    step = steps.forward(unit, kind)
    rows = (Rows.Q, Rows.K, Rows.V, Rows.OUT)
    track = Track(unit, "forward", kind, rows)
    e = track.e
    track.own_room()
    with e.forever() as done:
        number = e.take_number(track.fields, Field.NEXT)
        e.leave(done, e.b.icmp_signed(">=", number, track.of(Field.TRACKS)))
        track.enter(number)
        with e.loop(track.begin, track.end, TOKENS) as t:
            done_before = e.b.sub(t, track.begin)
            segment = e.b.sdiv(done_before, track.segment)
            within = e.b.srem(done_before, track.segment)
            begins = e.b.and_(
                e.b.icmp_signed("==", within, e.whole(0)), e.b.icmp_signed(">", segment, e.whole(0))
            )
            starts = track.of(Field.STARTS, POINTER)
            begins = e.b.and_(begins, e.b.not_(e.is_null(starts)))
            kept = e.at(starts, track.start(segment))
            e.copy(track.state, kept, e.either(begins, track.states_size, e.whole(0)))
            track.ask_for(e.sum(t, TOKENS), *rows)
            track.gather(t, (Rows.OUT,))
            track.call(step, track.state)
    e.finish()


def _backward(unit: Unit, kind: Kind) -> None:
    advance, step = steps.advance(unit, kind), steps.backward(unit, kind)
    written = (Rows.DQ, Rows.DK, Rows.DV, Rows.DBETA, Rows.DDECAY)
    rows = (Rows.Q, Rows.K, Rows.V, Rows.DO, *written)
    track = Track(unit, "backward", kind, rows)
    e = track.e
    states = track.own_room()
    count = e.sum(e.b.sdiv(track.segment, e.whole(TOKENS)), 1)
    short = e.at(states, e.product(count, track.states_size))
    held = e.at(short, e.product(track.segment, track.V))
    room = e.at(held, e.product(track.segment, track.V))

    def left_rows(n: Any) -> None:
        """Where the walk in a segment leaves rows of its tokens."""
        for which, pointer in ((Rows.SHORT, short), (Rows.HELD, held)):
            for c in _EACH:
                token = e.sum(e.product(n, TOKENS), c)
                row = e.at(pointer, e.product(token, track.V))
                e.set_field(track.table, which * TOKENS + c, row)

    with e.forever() as done:
        number = e.take_number(track.fields, Field.NEXT)
        e.leave(done, e.b.icmp_signed(">=", number, track.of(Field.TRACKS)))
        track.enter(number)
        length = e.b.sub(track.end, track.begin)
        segments = e.b.sdiv(e.sum(length, track.segment, -1), track.segment)
        with e.backward_loop(segments) as segment:
            first = e.sum(track.begin, e.product(segment, track.segment))
            last = e.sum(first, track.segment)
            last = e.either(e.b.icmp_signed("<", last, track.end), last, track.end)
            number_of_steps = e.b.sdiv(e.sum(e.b.sub(last, first), TOKENS - 1), e.whole(TOKENS))
            is_first = e.b.icmp_signed("==", segment, e.whole(0))
            source = e.either(
                is_first, track.of(Field.FIRST, POINTER), track.of(Field.STARTS, POINTER)
            )
            track.fetch(source, e.either(is_first, track.place, track.start(segment)), states)
            with e.loop(0, number_of_steps) as n:
                t = e.sum(first, e.product(n, TOKENS))
                track.ask_for(e.sum(t, TOKENS), Rows.K, Rows.V)
                track.gather(t, written)
                left_rows(n)
                before = e.at(states, e.product(n, track.states_size))
                track.call(advance, before, e.at(before, track.states_size))
            with e.backward_loop(number_of_steps) as n:
                t = e.sum(first, e.product(n, TOKENS))
                track.ask_for(e.sum(t, -TOKENS), *rows[:-2])
                track.gather(t, written)
                left_rows(n)
                track.call(step, e.at(states, e.product(n, track.states_size)), track.state, room)
    e.finish()


@cache
def kernel(name: str, kind: Kind) -> Compiled:
    """The compiled walk, `forward` or `backward`."""
    unit = Unit.new(kind.bits)
    (_forward if name == "forward" else _backward)(unit, kind)
    return Compiled.of(unit.module, name)
