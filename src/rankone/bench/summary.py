"""What the times say: ratios to the peers and to the copy of the data, exponents, tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rankone.bench.cases import OPS, OURS, PASSES, PEERS, SOFTMAX, Record
from rankone.provenance import TOLERATED_CORES

LABELS = {"forward": "forward", "forward_backward": "both passes"}
_FIT_FROM = 2048
_PLACE = ("op", "pass", "dtype", "device", "B", "T", "H", "K", "V")


def with_ratios(records: list[Record], bandwidth: float) -> list[Record]:
    """The records, ours with their ratios.

    `times_fla` and the like say how many times as long the peer takes;
    softmax attention has no decay and is the same for both. `decay_cost` is the time with decay
    over that without. `limit_ms`, of a forward pass, is the time in which the device copies as many
    bytes as q, k, v and the output have, and `times_limit` the time over it.
    """
    times = {(*_place(r), r["impl"], r["decay"]): r["ms"] for r in records}
    return [r | _ratios(r, times, bandwidth) if r["impl"] in OURS else r for r in records]


def _place(record: Record) -> tuple[Any, ...]:
    return tuple(record[name] for name in _PLACE)


def _ratios(record: Record, times: dict[tuple[Any, ...], float], bandwidth: float) -> Record:
    place, decay, ms = _place(record), record["decay"], record["ms"]
    found: Record = {}
    for peer in PEERS:
        theirs = times.get((*place, peer, decay and peer not in SOFTMAX))
        found[f"times_{peer}"] = _ratio(theirs, ms)
    plain = times.get((*place, record["impl"], False)) if decay else None
    found["decay_cost"] = _ratio(ms, plain)
    if record["pass"] == "forward" and math.isfinite(bandwidth):
        limit = 1000 * _moved(record) / bandwidth
        found |= {"limit_ms": float(f"{limit:.5g}"), "times_limit": _ratio(ms, limit)}
    return found


def _moved(record: Record) -> int:
    """Bytes of q, k, v and the output."""
    size = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}[record["dtype"]]
    rows = record["B"] * record["T"] * record["H"]
    return int(rows * 2 * (record["K"] + record["V"]) * size)


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else float(f"{above / below:.4g}")


def exponents(records: list[Record]) -> list[Record]:
    """How time and memory of ours grow: the slope against T, both logarithmic, from T = 2048 on.

    Where three lengths or more were measured with all other sizes the same.
    """
    found = []
    groups: dict[tuple[Any, ...], list[Record]] = {}
    names = ("op", "impl", "pass", "decay", "B", "H", "K", "V")
    for record in records:
        if record["impl"] in OURS and record["T"] >= _FIT_FROM:
            groups.setdefault(tuple(record[name] for name in names), []).append(record)
    for key, group in groups.items():
        if len(group) >= 3:
            facts = dict(zip(names, key, strict=True))
            found.append(facts | {"from_T": _FIT_FROM, **_slopes(group)})
    return found


def _slopes(group: list[Record]) -> Record:
    return {
        f"{name}_exponent": slope([(r["T"], r[name]) for r in group if r[name] is not None])
        for name in ("ms", "peak_gib")
    }


def slope(points: Iterable[tuple[float, float]]) -> float | None:
    """The exponent of a power law through the points, by least squares in logarithms.

    >>> slope([(1, 3), (2, 12), (4, 48)])
    2.0
    """
    logs = [(math.log(x), math.log(y)) for x, y in points]
    if len(logs) < 2:
        return None
    mean_x, mean_y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    square = sum((x - mean_x) ** 2 for x, _ in logs)
    return float(round(sum((x - mean_x) * (y - mean_y) for x, y in logs) / square, 3))


def show(result: dict[str, Any]) -> None:
    """Prints a table for each operation, and below them what was not measured and why."""
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=140, highlight=False)
    copied = result["copy_gb_per_s"]
    console.print(f"{result['device']}: ms a pass; a copy moves {copied:g} GB/s, read and written")
    for op in OPS:
        records = [r for r in result["records"] if r["op"] == op]
        if records:
            console.print(_table(op, records))
    for fit in result["exponents"]:
        console.print(
            f"{fit['op']}, {_name(fit)}, {LABELS[fit['pass']]}: time grows as T^"
            f"{fit['ms_exponent']}, memory as T^{fit['peak_gib_exponent']} from T = {fit['from_T']}"
        )
    for record in result["parity"]:
        if not record["within"]:
            console.print(
                f"{record['op']}, {_name(record)}, T = {record['T']}: above the limit, error "
                f"{record['error']}, of gradients {record['gradient_error']}"
            )
    for record in result["absent"]:
        console.print(f"absent: {record['op']}, {_name(record)}: {record['why']}")
    for record in result["left_out"]:
        place = f"B = {record['B']}, T = {record['T']}"
        part = f", {LABELS[record['pass']]}" if "pass" in record else ""
        told = f"left out: {record['op']}, {_name(record)}, {place}{part}: {record['why']}"
        console.print(told)
    others = result["other_cores"] or 0.0
    if others > TOLERATED_CORES and not any(r["device"] == "cuda" for r in result["records"]):
        console.print(f"Do not trust these times: other programs kept {others} cores busy.")


def _name(record: Record) -> str:
    return f"{record['impl']} with decay" if record["decay"] else str(record["impl"])


def entries(records: list[Record]) -> list[tuple[str, bool]]:
    """Implementations that occur, with and without decay: ours first."""
    names = [(impl, decay) for impl in (*OURS, *PEERS) for decay in (False, True)]
    present = {(r["impl"], r["decay"]) for r in records}
    return [name for name in names if name in present]


def _table(op: str, records: list[Record]) -> Table:
    """Rows are passes and shapes; columns times, then ratios of our fastest implementation."""
    sizes = ", ".join(f"{name} = {records[0][name]}" for name in "HKV")
    sizes += f", {records[0]['dtype']}"
    table = Table(title=f"{op}, {sizes}", title_justify="left", box=box.SIMPLE_HEAD)
    shown = entries(records)
    table.add_column("pass", no_wrap=True)
    heads = [f"{impl}\n+ decay" if decay else impl for impl, decay in shown]
    peers = [peer for peer in PEERS if peer in {impl for impl, _ in shown}]
    ratios = [f"times_{peer}" for peer in peers] + ["decay_cost", "times_limit"]
    titles = [f"times\n{peer}" for peer in peers] + ["decay\ncost", "times\nlimit"]
    graphs = any(r.get("graph_ms") for r in records)
    for head in ["B", "T", *heads, *titles, *(["graph\nms"] if graphs else []), "GiB"]:
        table.add_column(head, justify="right", no_wrap=True)
    places = list(dict.fromkeys((r["B"], r["T"]) for r in records))
    for name in PASSES:
        for place in places:
            row = {
                (r["impl"], r["decay"]): r
                for r in records
                if r["pass"] == name and (r["B"], r["T"]) == place
            }
            cells = [digits(row.get(entry, {}).get("ms")) for entry in shown]
            ours = our_row(row)
            cells += [digits(ours.get(ratio)) for ratio in ratios]
            cells += [digits(ours.get("graph_ms"))] * graphs + [digits(ours.get("peak_gib"))]
            table.add_row(LABELS[name], str(place[0]), str(place[1]), *cells)
        table.add_section()
    return table


def our_row(row: dict[tuple[str, bool], Record]) -> Record:
    """Our first implementation without decay, and what decay costs it."""
    for impl in OURS:
        if (impl, False) in row:
            cost = row.get((impl, True), {}).get("decay_cost")
            return row[impl, False] | {"decay_cost": cost}
    return {}


def digits(value: Any) -> str:
    """Three digits.

    >>> digits(0.012345), digits(1.5), digits(1234.5), digits(2.5e9), digits(None)
    ('0.0123', '1.50', '1234', '2.5e+09', '–')
    """
    if value is None:
        return "–"
    if value >= 1e7:
        return f"{value:.2g}"
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"
