"""The table of mechanisms: `rankone mechanisms`, and the same in the README.

`python -m rankone.report.mechanisms` writes it between the marks `mechanisms` of README.md and
docs/mechanisms.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from rankone.layers import MECHANISMS, build
from rankone.report.pages import replace_block
from rankone.storage import write_text

PAGES = ("README.md", "docs/mechanisms.md")
COLUMNS = ("name", "mechanism", "cost", "causal", "streams", "cross", "state", "exact", "paper")
DIM, HEADS, TOKENS = 512, 8, 4096


def rows(dim: int = DIM, heads: int = HEADS, tokens: int = TOKENS) -> list[dict[str, str]]:
    """One row for each mechanism; `state` is the count of numbers that a causal layer of this width
    carries behind so many tokens."""
    found = []
    for name, mechanism in MECHANISMS.items():
        facts = mechanism.facts
        size = "–"
        if facts.streams:
            count = state_size(name, dim=dim, heads=heads, tokens=tokens)
            size = f"{count:,} ({facts.state})"
        found.append(
            {
                "name": name,
                "mechanism": facts.title,
                "cost": facts.cost,
                "causal": _yes(facts.causal),
                "streams": _yes(facts.streams),
                "cross": _yes(facts.cross),
                "state": size,
                "exact": facts.exact,
                "paper": facts.paper,
            }
        )
    return found


@torch.no_grad()
def state_size(name: str, *, dim: int, heads: int, tokens: int, **options: Any) -> int:
    """Numbers in the state of a causal layer behind so many tokens of one sequence.

    >>> state_size("linear", dim=8, heads=2, tokens=100)
    40
    """
    layer = build(name, dim=dim, heads=heads, causal=True, **options)
    state, step = None, 1024
    for first in range(0, tokens, step):
        x = torch.zeros(1, min(step, tokens - first), dim)
        _, state = layer(x, state=state, return_state=True)
    return _numbers(state)


def _numbers(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.numel() if state.is_floating_point() else 0
    return sum(map(_numbers, state)) if isinstance(state, tuple) else 0


def _yes(what: bool) -> str:
    return "yes" if what else "no"


def show(dim: int = DIM, heads: int = HEADS, tokens: int = TOKENS) -> None:
    """Prints the table."""
    if dim < 1 or heads < 1 or dim % heads:
        raise ValueError(f"heads must divide dim, got {dim} and {heads}")
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=200, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, title=_told(dim, heads, tokens), title_justify="left")
    for column in COLUMNS:
        table.add_column(column)
    for row in rows(dim, heads, tokens):
        table.add_row(*(row[column] for column in COLUMNS))
    console.print(table)


def _told(dim: int, heads: int, tokens: int) -> str:
    return f"state: numbers of a causal layer, D = {dim}, H = {heads}, behind {tokens:,} tokens"


def markdown() -> str:
    """The table as a page has it."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in rows():
        cells = [f"`{row['name']}`", *(row[column] for column in COLUMNS[1:])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"({_told(DIM, HEADS, TOKENS)}; `rankone mechanisms`)"])


def write_pages(root: Path) -> list[Path]:
    """Writes the table into the pages of the checkout at `root`."""
    pages = [root / name for name in PAGES]
    if not all(page.is_file() for page in pages):
        raise ValueError(f"{root.resolve()} is not a checkout of rankone: run this in its root")
    table = markdown()
    texts = [replace_block(page.read_text(encoding="utf-8"), table, "mechanisms") for page in pages]
    for page, text in zip(pages, texts, strict=True):
        write_text(page, text)
    return pages


if __name__ == "__main__":
    try:
        for written in write_pages(Path()):
            print(f"wrote {written}")
    except ValueError as error:
        sys.exit(f"rankone: error: {error}")
