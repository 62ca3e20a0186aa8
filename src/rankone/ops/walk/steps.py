"""A few tokens of the recurrences as vector instructions.

With S the state before C tokens, l their decays, r(a, c) the product of those after token a up to
token c, and since_c the product of those up to c, what token c reads is the state plus what tokens
before it have written, so that the state is passed over twice for all C of them:

    held_c = since_c Sᵀ k_c + Σ_(a<c) r(a,c) (k_c·k_a) u_a        u_c = beta_c (v_c - held_c)
    o_c = scale (since_c Sᵀ q_c + Σ_(a≤c) r(a,c) (q_c·k_a) u_a)
    S ← since_C S + Σ_c until_c k_c u_cᵀ,                         until_c = r(c, C)

Backward, with Z the gradient of the state after the tokens and e_c = v_c - held_c:

    du_c = until_c Zᵀ k_c + Σ_(b≥c) scale r(c,b) (q_b·k_c) do_b - Σ_(b>c) r(c,b) (k_b·k_c) dv_b
    dv_c = beta_c du_c        dbeta_c = du_c·e_c
    dq_c = scale since_c S do_c + Σ_(a≤c) scale r(a,c) (do_c·u_a) k_a
    dk_c = until_c Z u_c - since_c S dv_c + Σ_(b≥c) scale r(c,b) (do_b·u_c) q_b
           - Σ_(b>c) r(c,b) (dv_b·u_c) k_b - Σ_(a<c) r(a,c) (dv_c·u_a) k_a
    Z ← since_C Z + Σ_c since_c (scale q_c do_cᵀ - k_c dv_cᵀ)

The gradient of decay c is all that passes from before token c to it or beyond: <Z, S>, what it and
later ones read of S, what earlier ones leave to Z, and what earlier ones give to it and later ones:

    ddecay_c = since_C <Z, S> + Σ_(b≥c) x_b + Σ_(a<c) y_a + Σ_(a<c≤b) r(a,b) (scale (q_b·k_a)
               (do_b·u_a) - (k_b·k_a) (dv_b·u_a)),   x_b = since_b (scale q_b·S do_b - k_b·S dv_b),
               y_a = until_a k_a·Z u_a

Linear attention has u = v and leaves out what erases. States are [K, V], and K and V are multiples
of the lanes of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import count
from typing import Any, NamedTuple

from rankone.ops.walk.emitter import POINTER, Unit, registers

TOKENS = 4
"""Tokens of a step, C."""

_EACH = range(TOKENS)
_UP_TO = [(c, a) for c in _EACH for a in range(c + 1)]
_BEFORE = [(c, a) for c in _EACH for a in range(c)]
_PAIRS = 16
"""Room for the products of pairs of tokens; as many as there are with and without c = a."""


class Rows(IntEnum):
    """Tables of pointers, one for each token of a step: where its numbers are."""

    Q = 0
    K = 1
    V = 2
    OUT = 3
    DO = 4
    DQ = 5
    DK = 6
    DV = 7
    SHORT = 8
    """e, what tokens are short of."""
    HELD = 9
    """since Sᵀ k."""
    DBETA = 10
    DDECAY = 11


class Numbers(IntEnum):
    """Where the numbers of a step are; one a token, or one a pair of tokens."""

    SCALE = 0
    BETA = 1
    SINCE = BETA + TOKENS
    UNTIL = SINCE + TOKENS
    BETWEEN = UNTIL + TOKENS
    """r(a, c) at C c + a."""
    KEYS = BETWEEN + TOKENS**2
    """r (k_c·k_a) for pairs a < c, then scale r (q_c·k_a) for pairs a <= c."""
    VALUES = KEYS + _PAIRS
    """Backward: r (dv_b·u_a) and scale r (do_b·u_a) likewise."""
    SUMS = VALUES + _PAIRS
    """Backward: some sums of each token."""
    SIZE = SUMS + _PAIRS + 16


class Kind(NamedTuple):
    """Which recurrence, and for numbers of how many bits."""

    erases: bool
    fades: bool
    bits: int

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Pairs of tokens (c, a) whose keys meet."""
        return _BEFORE if self.erases else []


class Step:
    """What all steps have: their rows, their numbers, the sizes of a state."""

    def __init__(self, unit: Unit, name: str, kind: Kind, pointers: int) -> None:
        self.kind = kind
        self.e = e = unit.function(name, "p" * (pointers + 2) + "ww")
        *self.pointers, self.table, self.numbers, self.K, self.V = e.arguments
        self.most = registers()[1] // (2 * TOKENS)
        """Vectors of a row of the state that can be worked on together."""

    def rows(self, which: Rows) -> list[Any]:
        """The pointers of all tokens."""
        return [self.e.field(self.table, which * TOKENS + c, POINTER) for c in _EACH]

    def number(self, where: int, n: int = 0) -> Any:
        """A number of the step in all lanes."""
        return self.e.splat(self.numbers, where + n)

    def pair_sums(
        self, pairs: Sequence[tuple[Any, Any]], size: Any, where: int, factors: Sequence[Any]
    ) -> None:
        """The inner products of pairs of rows of a size, each times a factor, or None for 1."""
        e = self.e
        sums = e.variables(len(pairs))
        with e.loop(0, size, e.lanes) as n:
            loaded: dict[Any, Any] = {}
            for a, b in pairs:
                for row in (a, b):
                    if row not in loaded:
                        loaded[row] = e.load(row, n)
            for (a, b), total in zip(pairs, sums, strict=True):
                e.add_to(total, loaded[a], loaded[b])
        e.store_lane_sums([e.value(x) for x in sums], self.numbers, where)
        self.multiply(where, factors)

    def multiply(self, where: int, factors: Sequence[Any]) -> None:
        """Numbers of the step, each times a factor, or None for 1."""
        for n, factor in enumerate(factors):
            if factor is not None:
                x = self.e.times(self.e.get(self.numbers, where + n), factor)
                self.e.put(x, self.numbers, where + n)

    def between(self, pairs: Sequence[tuple[int, int]]) -> list[Any]:
        """r(a, c) of pairs (c, a), None where it is 1."""
        e = self.e
        return [
            e.get(self.numbers, Numbers.BETWEEN + c * TOKENS + a)
            if self.kind.fades and a != c
            else None
            for c, a in pairs
        ]

    def scaled(self, factors: Sequence[Any]) -> list[Any]:
        """Factors times the scale."""
        scale = self.e.get(self.numbers, Numbers.SCALE)
        return [scale if x is None else self.e.times(scale, x) for x in factors]

    def keys_of_pairs(self, k: list[Any], q: list[Any] | None) -> None:
        """The products of keys with earlier keys, and of queries with earlier keys."""
        pairs, factors = [(k[c], k[a]) for c, a in self.kind.pairs], self.between(self.kind.pairs)
        if q is not None:
            pairs += [(q[c], k[a]) for c, a in _UP_TO]
            factors += self.scaled(self.between(_UP_TO))
        self.pair_sums(pairs, self.K, Numbers.KEYS, factors)

    def of_keys(self, c: int, a: int, where: int = Numbers.KEYS) -> Any:
        """r (k_c·k_a), or another product of the pair."""
        return self.number(where, self.kind.pairs.index((c, a)))

    def of_query(self, c: int, a: int, where: int = Numbers.KEYS) -> Any:
        """scale r (q_c·k_a), or another product of the pair."""
        return self.number(where, len(self.kind.pairs) + _UP_TO.index((c, a)))

    def faded(self, x: Any, where: int, n: int) -> Any:
        """x times since or until of a token."""
        return self.e.times(self.number(where, n), x) if self.kind.fades else x

    def products(self, state: Any, j: Any, columns: list[int], rows: list[Any]) -> list[list[Any]]:
        """Columns of Sᵀ times each of some rows."""
        e = self.e
        found = [e.variables(len(columns)) for _ in rows]
        with e.loop(0, self.K) as i:
            place = e.sum(e.product(i, self.V), j)
            parts = [e.load(state, place, n) for n in columns]
            for row, totals in zip(rows, found, strict=True):
                x = e.splat(row, i)
                for part, total in zip(parts, totals, strict=True):
                    e.add_to(total, x, part)
        return [[e.value(x) for x in totals] for totals in found]

    def write(
        self, before: Any, after: Any, j: Any, columns: list[int], k: list[Any], u: list[list[Any]]
    ) -> None:
        """Columns of the state after the tokens from those before them."""
        e = self.e
        u = [
            [self.faded(x, Numbers.UNTIL, c) if c < TOKENS - 1 else x for x in u[c]] for c in _EACH
        ]
        with e.loop(0, self.K) as i:
            place = e.sum(e.product(i, self.V), j)
            keys = [e.splat(row, i) for row in k]
            for m, n in enumerate(columns):
                x = self.faded(e.load(before, place, n), Numbers.SINCE, TOKENS - 1)
                for c in _EACH:
                    x = e.plus(x, keys[c], u[c][m])
                e.store(x, after, place, n)

    def short(
        self, c: int, place: tuple[Any, ...], held: Any, v: Any, u: list[Any]
    ) -> tuple[Any, Any]:
        """since Sᵀ k and e of token c, from Sᵀ k and what earlier tokens have written."""
        held = self.faded(held, Numbers.SINCE, c)
        total = held
        for a in range(c):
            total = self.e.plus(total, self.of_keys(c, a), u[a])
        return held, self.e.b.fsub(self.e.load(v, *place), total)


def forward(unit: Unit, kind: Kind) -> Any:
    """Outputs, and the state after the tokens in place: (S, table, numbers, K, V)."""
    s = Step(unit, "forward_step", kind, 1)
    e, (S,) = s.e, s.pointers
    q, k, v, out = (s.rows(which) for which in (Rows.Q, Rows.K, Rows.V, Rows.OUT))
    s.keys_of_pairs(k, q)
    scale = s.number(Numbers.SCALE)
    for j, columns in e.blocks_of_columns(s.V, s.most // 2):
        read = s.products(S, j, columns, [*q, *k] if kind.erases else q)
        u: list[list[Any]] = []
        for c in _EACH:
            own = []
            for m, n in enumerate(columns):
                if kind.erases:
                    _, x = s.short(c, (j, n), read[TOKENS + c][m], v[c], [x[m] for x in u])
                    x = e.times(s.number(Numbers.BETA, c), x)
                else:
                    x = e.load(v[c], j, n)
                own.append(x)
            u.append(own)
            for m, n in enumerate(columns):
                o = e.times(scale, s.faded(read[c][m], Numbers.SINCE, c))
                for a in range(c + 1):
                    o = e.plus(o, s.of_query(c, a), u[a][m])
                e.store(o, out[c], j, n)
        s.write(S, S, j, columns, k, u)
    return e.finish()


def advance(unit: Unit, kind: Kind) -> Any:
    """The state after the tokens at another place, and what the backward needs of the walk there:
    (before, after, table, numbers, K, V)."""
    s = Step(unit, "advance_step", kind, 2)
    e, (before, after) = s.e, s.pointers
    k, v, short, held = (s.rows(which) for which in (Rows.K, Rows.V, Rows.SHORT, Rows.HELD))
    if kind.erases:
        s.keys_of_pairs(k, None)
    for j, columns in e.blocks_of_columns(s.V, s.most):
        read = s.products(before, j, columns, k) if kind.erases else []
        u: list[list[Any]] = []
        for c in _EACH:
            own = []
            for m, n in enumerate(columns):
                if kind.erases:
                    x, error = s.short(c, (j, n), read[c][m], v[c], [x[m] for x in u])
                    e.store(error, short[c], j, n)
                    if kind.fades:
                        e.store(x, held[c], j, n)
                    own.append(e.times(s.number(Numbers.BETA, c), error))
                else:
                    own.append(e.load(v[c], j, n))
            u.append(own)
        s.write(before, after, j, columns, k, u)
    return e.finish()


class Backward(Step):
    """All gradients of the tokens, and that of the state before them in place of that after them:
    (S, Z, room, table, numbers, K, V)."""

    def __init__(self, unit: Unit, kind: Kind) -> None:
        super().__init__(unit, "backward_step", kind, 3)
        e = self.e
        self.S, self.Z, room = self.pointers
        names = (Rows.Q, Rows.K, Rows.V, Rows.DO, Rows.DQ, Rows.DK, Rows.DV, Rows.HELD)
        self.q, self.k, self.v, self.do, self.dq, self.dk, self.dv, self.held = map(
            self.rows, names
        )
        self.error = self.rows(Rows.SHORT) if kind.erases else self.v
        numbers = count()
        # Rows of V numbers for each token: u, until u, scale since do, since dv.
        self.u, self.left, self.asked, self.erased = (
            [e.at(room, e.product(next(numbers), self.V)) for _ in _EACH] for _ in range(4)
        )
        self.sums = e.at(room, e.product(next(numbers), self.V))
        """Vectors whose lanes are to be summed: K of dq, then K of dk, for each token."""
        self.of_tokens = {name: e.variables(TOKENS) for name in ("beta", "left", "erased", "read")}
        (self.of_states,) = e.variables(1)

    def emit(self) -> Any:
        """The function."""
        self.keys_of_pairs(self.k, self.q)
        for j, columns in self.e.blocks_of_columns(self.V, self.most):
            self.values(j, columns)
        self.values_of_pairs()
        self.states()
        self.keys()
        self.scalars()
        return self.e.finish()

    def values(self, j: Any, columns: list[int]) -> None:
        """Columns of dv, and what is made of them."""
        e, kind = self.e, self.kind
        scale = self.number(Numbers.SCALE)
        z = self.products(self.Z, j, columns, self.k)
        for m, n in enumerate(columns):
            do = [e.load(row, j, n) for row in self.do]
            dv: list[Any] = [None] * TOKENS
            for c in reversed(_EACH):
                left = self.faded(z[c][m], Numbers.UNTIL, c)
                du = left
                for b in range(c, TOKENS):
                    du = e.plus(du, self.of_query(b, c), do[b])
                for b in range(c + 1, TOKENS if kind.erases else 0):
                    du = e.minus(du, self.of_keys(b, c), dv[b])
                u = e.load(self.error[c], j, n)
                dv[c] = du
                if kind.erases:
                    beta = self.number(Numbers.BETA, c)
                    e.add_to(self.of_tokens["beta"][c], du, u)
                    u, dv[c] = e.times(beta, u), e.times(beta, du)
                    erased = self.faded(dv[c], Numbers.SINCE, c)
                    e.store(erased, self.erased[c], j, n)
                if kind.fades:
                    e.add_to(self.of_tokens["left"][c], left, u)
                    if kind.erases:
                        e.add_to(self.of_tokens["erased"][c], e.load(self.held[c], j, n), dv[c])
                e.store(dv[c], self.dv[c], j, n)
                e.store(u, self.u[c], j, n)
                e.store(self.faded(u, Numbers.UNTIL, c), self.left[c], j, n)
                asked = e.times(scale, self.faded(do[c], Numbers.SINCE, c))
                e.store(asked, self.asked[c], j, n)

    def values_of_pairs(self) -> None:
        """The products of dv with earlier u, and of do with earlier u."""
        e = self.e
        pairs = [(self.dv[b], self.u[a]) for b, a in self.kind.pairs]
        pairs += [(self.do[b], self.u[a]) for b, a in _UP_TO]
        self.pair_sums(pairs, self.V, Numbers.VALUES, [])
        if self.kind.fades:
            self.passing = {
                pair: e.times(
                    e.get(self.numbers, Numbers.KEYS, n), e.get(self.numbers, Numbers.VALUES, n)
                )
                for n, pair in enumerate(
                    [(b, a, "dv") for b, a in self.kind.pairs] + [(b, a, "do") for b, a in _UP_TO]
                )
                if pair[0] != pair[1]
            }
        factors = self.between(self.kind.pairs) + self.scaled(self.between(_UP_TO))
        self.multiply(Numbers.VALUES, factors)

    def states(self) -> None:
        """Rows of Z; what dq gets from S and dk from both, still to be summed over lanes."""
        e, kind = self.e, self.kind
        whole = self.number(Numbers.SINCE, TOKENS - 1) if kind.fades else None
        with e.loop(0, self.K) as i:
            row = e.product(i, self.V)
            q, k = ([e.splat(x, i) for x in rows] for rows in (self.q, self.k))
            dq, dk = e.variables(TOKENS), e.variables(TOKENS)
            with e.loop(0, self.V, e.lanes) as j:
                S, Z = e.load(self.S, row, j), e.load(self.Z, row, j)
                if whole is not None:
                    e.add_to(self.of_states, S, Z)
                after = Z if whole is None else e.times(whole, Z)
                for c in _EACH:
                    asked = e.load(self.asked[c], j)
                    e.add_to(dq[c], S, asked)
                    after = e.plus(after, q[c], asked)
                    e.add_to(dk[c], Z, e.load(self.left[c], j))
                    if kind.erases:
                        erased = e.load(self.erased[c], j)
                        e.subtract_from(dk[c], S, erased)
                        after = e.minus(after, k[c], erased)
                e.store(after, self.Z, row, j)
            for n, total in enumerate([*dq, *dk]):
                place = e.product(e.sum(e.product(n, self.K), i), e.lanes)
                e.store(e.value(total), self.sums, place)

    def keys(self) -> None:
        """dq and dk."""
        e, kind = self.e, self.kind
        with e.loop(0, self.K, e.lanes) as i:
            q, k = ([e.load(x, i) for x in rows] for rows in (self.q, self.k))
            for c in _EACH:
                found = self.summed(c, i)
                if kind.fades:
                    e.add_to(self.of_tokens["read"][c], q[c], found)
                for a in range(c + 1):
                    found = e.plus(found, self.of_query(c, a, Numbers.VALUES), k[a])
                e.store(found, self.dq[c], i)
                found = self.summed(TOKENS + c, i)
                for b in range(c, TOKENS):
                    found = e.plus(found, self.of_query(b, c, Numbers.VALUES), q[b])
                for b, a in kind.pairs:
                    if c in (b, a):
                        other = k[a] if c == b else k[b]
                        found = e.minus(found, self.of_keys(b, a, Numbers.VALUES), other)
                e.store(found, self.dk[c], i)

    def summed(self, n: int, i: Any) -> Any:
        """The sums of row n's vectors from i on."""
        e = self.e
        first = e.sum(e.product(n, self.K), i)
        places = [e.product(e.sum(first, lane), e.lanes) for lane in range(e.lanes)]
        return e.lane_sums([e.load(self.sums, place) for place in places])

    def scalars(self) -> None:
        """dbeta and ddecay."""
        e, kind = self.e, self.kind
        sums = [e.value(x) for each in self.of_tokens.values() for x in each]
        e.store_lane_sums([*sums, e.value(self.of_states)], self.numbers, Numbers.SUMS)
        of_beta, of_left, of_erased, of_read, states = (
            [e.get(self.numbers, Numbers.SUMS + TOKENS * n + c) for c in (_EACH if n < 4 else (0,))]
            for n in range(5)
        )
        for c in _EACH:
            if kind.erases:
                e.put(of_beta[c], e.field(self.table, Rows.DBETA * TOKENS + c, POINTER))
            if not kind.fades:
                continue
            whole = e.get(self.numbers, Numbers.SINCE + TOKENS - 1)
            total = e.times(whole, states[0])
            for n in _EACH:
                total = e.b.fadd(total, of_read[n] if n >= c else of_left[n])
                if kind.erases and n >= c:
                    total = e.b.fsub(total, of_erased[n])
            for (b, a, name), x in self.passing.items():
                if a < c <= b:
                    total = e.b.fadd(total, x) if name == "do" else e.b.fsub(total, x)
            e.put(total, e.field(self.table, Rows.DDECAY * TOKENS + c, POINTER))


def backward(unit: Unit, kind: Kind) -> Any:
    """See `Backward`."""
    return Backward(unit, kind).emit()
