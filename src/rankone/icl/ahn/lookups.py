"""Finding things among the records of a reproduction."""

from __future__ import annotations

from collections.abc import Sequence

from rankone.icl.ahn.records import Record

SAME = 0.05
"""Two models are in the same minimum if no multiple differs by more of the largest one."""


def models_of(records: Sequence[Record], name: str) -> list[Record]:
    """The models of a group, a record a seed."""
    return [r for r in records if r["record"] == "model" and r["experiment"] == name]


def best_models(records: Sequence[Record], name: str) -> list[Record]:
    """The models in the minimum of the one with the least loss."""
    models = models_of(records, name)
    key = "nearest_loss" if name.endswith("-expectation") else "median_loss"
    known = [m for m in models if m[key] is not None]
    if not known:
        return []
    values = {m["seed"]: _values(records, name, m["seed"]) for m in known}
    first = values[min(known, key=lambda m: float(m[key]))["seed"]]
    largest = max(map(abs, first))
    return [
        m
        for m in known
        if max(abs(x - y) for x, y in zip(values[m["seed"]], first, strict=True)) < SAME * largest
    ]


def _values(records: Sequence[Record], name: str, seed: int) -> list[float]:
    return [
        r["multiple"]
        for r in records
        if r["record"] == "matrix" and r["experiment"] == name and r["seed"] == seed
    ]


def multiples_of(
    records: Sequence[Record], name: str, *, best: bool = False
) -> dict[str, list[tuple[float, list[float], list[float]]]]:
    """Matrix → for each layer the published multiple, ours of all seeds, and the distances."""
    seeds = {m["seed"] for m in (best_models if best else models_of)(records, name)}
    found: dict[str, dict[int, list[Record]]] = {}
    for r in records:
        if r["record"] == "matrix" and r["experiment"] == name and r["seed"] in seeds:
            found.setdefault(r["matrix"], {}).setdefault(r["layer"], []).append(r)
    return {
        matrix: [
            (rows[0]["published"], [r["multiple"] for r in rows], [r["distance"] for r in rows])
            for _, rows in sorted(layers.items())
        ]
        for matrix, layers in found.items()
    }


def is_optimum(r: Record, family: str, layers: int, n: int) -> bool:
    """Whether a record is about an exact optimum of this kind of model for n examples."""
    key = (r["record"], r.get("family"), r.get("layers"), r.get("examples"))
    return key == ("optimum", family, layers, n)


def optimum_of(records: Sequence[Record], family: str, layers: int, n: int) -> Record:
    """The best of these optima; empty if there is none."""
    rows = [r for r in records if is_optimum(r, family, layers, n)]
    return min(rows, key=lambda r: float(r["loss"])) if rows else {}


def baseline_of(
    records: Sequence[Record], method: str, layers: int, n: int, given: int
) -> float | None:
    """The expected loss of a baseline for n examples of which it is given some."""
    key = ("baseline", method, layers, n, given)
    names = ("record", "method", "layers", "examples", "given")
    return next(
        (r["expected_loss"] for r in records if tuple(r.get(k) for k in names) == key), None
    )


def in_order_of(values: Sequence[float], order: Sequence[float]) -> list[float]:
    """Values in the order in which others are: the least where the least of those is.

    >>> in_order_of([1.0, 2.0, 3.0], [0.5, 0.3, 0.4])
    [3.0, 1.0, 2.0]
    """
    ranks = [sorted(order).index(value) for value in order]
    return [sorted(values)[rank] for rank in ranks]
