"""The report: one page that holds everything, and needs no network and no script."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rankone.report.captions import CAPTIONS
from rankone.report.layout import MARK, Cell, Grid, arrange, format_ours
from rankone.report.records import TableRecord, number

_CSS = """
:root { color-scheme: light dark; --text: #1d1d1f; --soft: #5f6368; --page: #ffffff;
  --line: #d9dce0; --head: #f3f4f6; --better: #cfeedd; --within: #eaf6ef; --worse: #f9d4c5; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e8; --soft: #a2a7ae; --page: #17181b; --line: #3a3d42; --head: #222428;
    --better: #14523a; --within: #1b3329; --worse: #6e2c14; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 86rem; padding: 1.5rem 1rem 4rem; background: var(--page);
  color: var(--text); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .6rem; }
p, figcaption, li { max-width: 62rem; }
.soft, figcaption { color: var(--soft); font-size: .92rem; }
figcaption strong { color: var(--text); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px;
  width: fit-content; max-width: 100%; }
table { border-collapse: collapse; font-size: .8rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .42rem; white-space: nowrap; }
thead th { background: var(--head); text-align: right; }
thead th:first-child, tbody th { text-align: left; font-weight: 500; }
tbody th { position: sticky; left: 0; background: var(--page); }
tr.group td { background: var(--head); }
tr.group th { background: var(--head); font-weight: 600; padding-top: .4rem; }
td { text-align: right; }
td small { color: var(--soft); font-size: .92em; }
.better { background: var(--better); } .within { background: var(--within); }
.worse { background: var(--worse); }
td.better small, td.worse small { color: inherit; opacity: .8; }
.key span { display: inline-block; padding: 0 .45rem; border-radius: 4px;
  margin: .1rem .3rem .1rem 0; }
figure { margin: 1.2rem 0 2.2rem; }
figure .scroll { width: auto; background: #ffffff; margin-bottom: .6rem; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; padding: .4rem; }
@media (max-width: 700px) { figure img { max-width: none; width: 52rem; } }
details { margin-top: 1rem; } summary { cursor: pointer; }
pre { overflow-x: auto; background: var(--head); border-radius: 6px; padding: .8rem;
  font-size: .82rem; line-height: 1.4; }
"""


def report_html(
    title: str,
    table_records: Sequence[TableRecord],
    figures: Mapping[str, bytes],
    config: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> str:
    """The whole report as one HTML page.

    `figures` maps names (`fig1` …) to PNG bytes, in the order of the page; `config` is shown as
    JSON, with versions and all; `notes` are plain sentences: restarts, what is not shown.
    Without table records the page has no table. All text is escaped.
    """
    parts = [
        f"<h1>{escape(title)}</h1>",
        _table(arrange(table_records)) if table_records else "",
        "<h2>Figures</h2>" if figures else "",
        *(_figure(name, png) for name, png in figures.items()),
        _notes(notes),
        _configuration(config),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _table(grid: Grid) -> str:
    heads = "".join(f'<th scope="col">{escape(noise.label)}</th>' for noise in grid.noises)
    lines = []
    for group, rows in grid.groups():
        empty = f'<td colspan="{len(grid.noises)}"></td>'
        lines.append(f'<tr class="group"><th scope="rowgroup">{escape(group)}</th>{empty}</tr>')
        for row in rows:
            cells = "".join(map(_cell, row.cells))
            lines.append(f'<tr><th scope="row">{escape(row.label)}</th>{cells}</tr>')
    return (
        "<h2>Table 1: adjusted evaluation loss</h2>\n"
        f"{_summary(grid)}\n"
        '<p class="key"><span class="better">ours is below the published value</span> '
        '<span class="within">within its limit</span> '
        f'<span class="worse">outside its limit {MARK}</span></p>\n'
        '<div class="scroll" tabindex="0" role="region" aria-label="Table 1">\n'
        f'<table>\n<thead><tr><th scope="col">method</th>{heads}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + f'\n</tbody>\n</table>\n</div>\n<p class="soft">{escape(grid.caption)}</p>'
    )


def _summary(grid: Grid) -> str:
    cells = [cell for row in grid.rows for cell in row.cells if cell is not None]
    kept = [cell for cell in cells if _verdict(cell) in ("better", "within")]
    missed = [cell for cell in cells if cell.worse]
    judged = len(kept) + len(missed)
    if not judged:
        return ""
    tail = f"; {len(missed)} outside" if missed else ""
    return f"<p>{len(kept)} of {judged} cells keep their limits{tail}.</p>"


def _verdict(cell: Cell) -> str:
    if cell.worse:
        return "worse"
    record = cell.record
    if record.get("within") is None and record.get("limit") is None:
        return ""
    published = record["published"]
    return (
        "better"
        if published is not None and number(record["adjusted_loss"]) < published
        else "within"
    )


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "<td>–</td>"
    ours = f"<strong>{escape(cell.ours)}</strong>" if cell.best else escape(cell.ours)
    mark = f" {MARK}" if cell.worse else ""
    published = f" <small>({escape(cell.published)})</small>" if cell.published else ""
    verdict = _verdict(cell)
    style = f' class="{verdict}"' if verdict else ""
    return f'<td{style} title="{escape(_details(cell.record))}">{ours}{mark}{published}</td>'


def _details(record: TableRecord) -> str:
    """What stands behind a cell, shown when the pointer rests on it."""
    numbers = {
        "standard error": record["standard_error"],
        "limit": record.get("limit"),
        "floor": record["floor"],
    }
    details = [
        f"{name} {format_ours(value)}" for name, value in numbers.items() if value is not None
    ]
    if record.get("seeds") is not None:
        details.append(f"seed {record.get('seed')} of {record.get('seeds')}")
    if record.get("restarts"):
        details.append(f"restarts {record.get('restarts')}")
    return ", ".join(details)


def _figure(name: str, png: bytes) -> str:
    title, caption = CAPTIONS.get(name, (name, ""))
    data = base64.b64encode(png).decode("ascii")
    return (
        f'<figure id="{escape(name)}">\n'
        f'<div class="scroll"><img alt="{escape(title)}" '
        f'src="data:image/png;base64,{data}"></div>\n'
        f"<figcaption><strong>{escape(title)}.</strong> {escape(caption)}</figcaption>\n</figure>"
    )


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "\n".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<h2>Notes</h2>\n<ul>\n{items}\n</ul>"


def _configuration(config: Mapping[str, Any]) -> str:
    text = json.dumps(config, indent=2, ensure_ascii=False, default=str)
    return (
        "<h2>Configuration</h2>\n<details>\n<summary>The resolved configuration and versions"
        f"</summary>\n<pre>{escape(text)}</pre>\n</details>"
    )
