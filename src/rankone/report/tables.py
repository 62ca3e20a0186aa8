"""Table 1 as Markdown, LaTeX, CSV and for the terminal.

rows     1 layer: GD++, DIAG, FULL · 2 layers: … · ConstRR, AdaRR, TunedRR · Bayes (floor)
columns  the noise distributions
cells    ours (published), e.g. 0.0448 (0.047)
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from rankone.report.layout import MARK, Cell, Grid, arrange
from rankone.report.records import TableRecord

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

FIELDS = (*TableRecord.__annotations__,)
"""The columns of the CSV."""

_INTEGERS = {"layers", "seed", "seeds", "restarts"}
_NAMES = {"model", "noise"}
_MISSING = "–"


def table1_markdown(records: Iterable[TableRecord]) -> str:
    """The table in Markdown, with its caption below."""
    grid = arrange(records)
    lines = [
        "| | method | " + " | ".join(noise.label for noise in grid.noises) + " |",
        "|---|---|" + "---:|" * len(grid.noises),
    ]
    for group, rows in grid.groups():
        for index, row in enumerate(rows):
            cells = " | ".join(map(_markdown_cell, row.cells))
            lines.append(f"| {group if index == 0 else ''} | {row.label} | {cells} |")
    return "\n".join(lines) + f"\n\n{grid.caption}\n"


def table1_latex(records: Iterable[TableRecord]) -> str:
    r"""The table as a LaTeX `table` environment; needs booktabs, and graphicx to fit the page."""
    grid = arrange(records)
    columns = "ll" + "r" * len(grid.noises)
    body = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    body.append("& Method & " + " & ".join(noise.latex for noise in grid.noises) + r" \\")
    for group, rows in grid.groups():
        body.append(r"\midrule")
        for index, row in enumerate(rows):
            cells = " & ".join(map(_latex_cell, row.cells))
            body.append(f"{group if index == 0 else ''} & {row.label} & {cells}" + r" \\")
    body += [r"\bottomrule", r"\end{tabular}"]
    lines = [
        r"% \usepackage{booktabs,graphicx}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{grid.caption.replace(MARK, _LATEX_MARK)}}}",
        r"\label{tab:table1}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        *body,
        r"}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def table1_csv(records: Iterable[TableRecord]) -> str:
    """All fields of all cells, one row a cell; a field that is not known is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def read_table1_csv(text: str) -> list[TableRecord]:
    """The records that `table1_csv` wrote, with None for empty fields."""
    rows = csv.DictReader(io.StringIO(text))
    return [
        cast(TableRecord, {field: _parse(field, value) for field, value in row.items()})
        for row in rows
    ]


def table1_text(records: Iterable[TableRecord], width: int = 100) -> Group:
    """The table for a terminal of `width` characters, to be printed by rich.

    Where the columns do not fit side by side they are continued in a further table below.
    """
    from rich.console import Group
    from rich.text import Text

    grid = arrange(records)
    parts: list[list[int]] = []
    room = 0
    for column, noise in enumerate(grid.noises):
        cells = [row.cells[column] for row in grid.rows]
        needed = 3 + max(len(noise.label), *(len(cell.plain) for cell in cells if cell is not None))
        if needed > room:
            parts.append([])
            room = width - _TEXT_HEAD
        parts[-1].append(column)
        room -= needed
    tables = [_text_part(grid, part) for part in parts]
    return Group(*tables, Text(grid.caption, style="dim"))


_TEXT_HEAD = len("not in the paper") + len("Bayes (floor)") + 5


def _text_part(grid: Grid, columns: Sequence[int]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(grid.noises[column].label, justify="right", no_wrap=True)
    for group, rows in grid.groups():
        for index, row in enumerate(rows):
            cells = [_text_cell(row.cells[column]) for column in columns]
            head = Text(group if index == 0 else "", style="dim")
            table.add_row(head, Text(row.label), *cells, end_section=index == len(rows) - 1)
    return table


def _text_cell(cell: Cell | None) -> Any:
    from rich.text import Text

    if cell is None:
        return Text(_MISSING, style="dim")
    style = " ".join(["bold"] * cell.best + ["red"] * cell.worse)
    mark = f" {MARK}" if cell.worse else ""
    published = (f" ({cell.published})", "dim") if cell.published else ""
    return Text.assemble((cell.ours + mark, style), published)


def _markdown_cell(cell: Cell | None) -> str:
    if cell is None:
        return _MISSING
    return cell.plain.replace(cell.ours, f"**{cell.ours}**", 1) if cell.best else cell.plain


_LATEX_MARK = r"\textsuperscript{\textdagger}"


def _latex_cell(cell: Cell | None) -> str:
    if cell is None:
        return "--"
    ours = rf"\textbf{{{cell.ours}}}" if cell.best else cell.ours
    mark = _LATEX_MARK if cell.worse else ""
    return f"{ours}{mark} ({cell.published})" if cell.published else f"{ours}{mark}"


def _parse(field: str, value: str) -> str | int | float | bool | None:
    if field in _NAMES:
        return value
    if value == "":
        return None
    if field == "within":
        return value == "True"
    return int(value) if field in _INTEGERS else float(value)
