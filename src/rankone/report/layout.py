"""The layout of Table 1, shared by every form it is written in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rankone.report.records import (
    BASELINES,
    LABELS,
    MODELS,
    Noise,
    NothingToShowError,
    TableRecord,
    is_worse,
    layers_label,
    noises_of,
    number,
)

MARK = "†"
"""Stands beside a value that misses its limit."""

_Key = tuple[str, int | None, str]


@dataclass(frozen=True)
class Cell:
    """A record with its place in the column."""

    record: TableRecord
    best: bool

    @property
    def ours(self) -> str:
        """Our value, with four decimals."""
        return format_ours(self.record["adjusted_loss"])

    @property
    def published(self) -> str:
        """The published value as the paper prints it, or nothing."""
        return format_published(self.record["published"])

    @property
    def worse(self) -> bool:
        """Whether the value misses its limit."""
        return is_worse(self.record)

    @property
    def plain(self) -> str:
        """Both values: `0.0448 (0.047)`, with the mark where ours misses its limit."""
        mark = f" {MARK}" if self.worse else ""
        return f"{self.ours}{mark} ({self.published})" if self.published else f"{self.ours}{mark}"


@dataclass(frozen=True)
class Row:
    """A method: the group is the depth, `closed form` or `not in the paper`."""

    group: str
    label: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Grid:
    """The whole table: a column for each noise, a row for each method."""

    noises: tuple[Noise, ...]
    rows: tuple[Row, ...]
    caption: str

    def groups(self) -> list[tuple[str, list[Row]]]:
        """Rows by group, in order."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.group, []).append(row)
        return list(groups.items())


def format_ours(value: float | None) -> str:
    """Four decimals, three digits and an exponent for tiny values, `n/a` for none.

    >>> format_ours(0.04483), format_ours(2.5e-12), format_ours(0.0)
    ('0.0448', '2.50e-12', '0')
    """
    if value is None or not math.isfinite(value):
        return "n/a"
    if value == 0:
        return "0"
    return f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.2e}"


def format_published(value: float | None) -> str:
    """As the paper prints it: three decimals, or an exponent; empty where it prints nothing.

    >>> format_published(0.01), format_published(9.91e-05), format_published(None)
    ('0.010', '9.91e-05', '')
    """
    if value is None:
        return ""
    if value == 0:
        return "0"
    return f"{value:.3f}" if abs(value) >= 1e-3 else f"{value:.2e}"


def arrange(records: Iterable[TableRecord]) -> Grid:
    """Puts table records into the paper's order of rows and columns.

    Raises `NothingToShowError` without records, ValueError where two claim one cell.
    """
    rows = list(records)
    if not rows:
        raise NothingToShowError("the table has no records")
    cells: dict[_Key, TableRecord] = {}
    for record in rows:
        key = (record["model"], record["layers"], record["noise"])
        if key in cells:
            raise ValueError(f"the table has two records for {key}")
        cells[key] = record
    noises = tuple(noises_of(rows))
    for noise in noises:
        _add_floor(cells, noise)
    best = {noise.name: _best(rows, noise) for noise in noises}
    grid_rows = [
        Row(group, label, tuple(_cell(cells.get((*key, noise.name)), best) for noise in noises))
        for group, label, key in _methods(cells)
    ]
    return Grid(noises, tuple(grid_rows), caption(rows))


def caption(records: Sequence[TableRecord]) -> str:
    """What a cell is, by which convention, and what the marks mean."""
    seeds = max((record.get("seeds") or 1 for record in records), default=1)
    chosen = (
        f"Trained models: best of {seeds} seeds. " if seeds > 1 else "Trained models: one seed. "
    )
    return (
        "Adjusted evaluation loss: half the mean squared error, minus that of ridge regression "
        "which knows the noise, on the median draw of prompts. A cell is ours (published). "
        + chosen
        + "Bold: the lowest of ours in its column, floor aside. "
        + f"{MARK}: outside its limit, the published value plus two standard errors, or the "
        "population value where the published one is out of reach. "
        "Bayes: the least that any predictor can reach without knowing the noise. "
        "Standard errors are in the CSV."
    )


def _methods(cells: Iterable[_Key]) -> list[tuple[str, str, tuple[str, int | None]]]:
    present = {(model, layers) for model, layers, _ in cells}
    depths = sorted({layers for model, layers in present if model in MODELS and layers is not None})
    wanted: list[tuple[str, tuple[str, int | None]]] = [
        (layers_label(layers), (model, layers)) for layers in depths for model in MODELS
    ]
    wanted += [("closed form", (model, None)) for model in BASELINES]
    wanted.append(("not in the paper", ("bayes", None)))
    return [(group, LABELS[key[0]], key) for group, key in wanted if key in present]


def _add_floor(cells: dict[_Key, TableRecord], noise: Noise) -> None:
    """Without a Bayes record of its own, the floor stands in the other records of the column."""
    key: _Key = ("bayes", None, noise.name)
    floors = [r["floor"] for r in cells.values() if r["noise"] == noise.name]
    known = [floor for floor in floors if floor is not None]
    if key not in cells and known:
        cells[key] = TableRecord(
            model="bayes",
            layers=None,
            noise=noise.name,
            adjusted_loss=known[0],
            standard_error=None,
            published=None,
            floor=known[0],
        )


def _best(records: Iterable[TableRecord], noise: Noise) -> str | None:
    """The column's lowest value as it is printed: what prints alike is equally good."""
    values = [
        number(record["adjusted_loss"])
        for record in records
        if record["noise"] == noise.name and record["model"] in (*MODELS, *BASELINES)
    ]
    finite = [value for value in values if math.isfinite(value)]
    return format_ours(min(finite)) if finite else None


def _cell(record: TableRecord | None, best: dict[str, str | None]) -> Cell | None:
    if record is None:
        return None
    contender = record["model"] in (*MODELS, *BASELINES)
    return Cell(record, contender and format_ours(record["adjusted_loss"]) == best[record["noise"]])
