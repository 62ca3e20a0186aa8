"""Tables and the picture of `rankone bench approximation`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D
from rich import box
from rich.console import Console
from rich.table import Table

from rankone.bench.plots import lengths_axis
from rankone.bench.summary import digits
from rankone.report.figures.files import render
from rankone.report.figures.style import legend_below, log_axis, panel_rows, styled
from rankone.storage import write_bytes

_LOOKS: dict[str, tuple[str, str, Any]] = {
    "performer": ("#CC79A7", "^", "-"),
    "performer, independent": ("#CC79A7", "v", "--"),
    "sines and cosines": ("#E69F00", "v", "--"),
    "linformer, not trained": ("#56B4E9", "s", "-"),
    "nystromformer": ("#0072B2", "P", "-"),
    "longformer": ("#009E73", "X", "-"),
    "bigbird": ("#7A6A00", "*", "-"),
}


def publish(path: Path, result: dict[str, Any]) -> Path:
    """Prints the tables and draws the plot beside the file."""
    show(result)
    picture = path.with_suffix(".png")
    write_bytes(picture, plot(result))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{result['seconds']:.0f} s; {path} and {picture.name}")
    return path


def show(result: dict[str, Any]) -> None:
    """Errors by what there is of each approximation; then the random features."""
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=140, highlight=False)
    for data in _kinds(result["records"]):
        own = [r for r in result["records"] if r["data"] == data]
        counts = sorted({r["count"] for r in own})
        table = Table(
            title=f"{data}: relative error beside softmax attention", title_justify="left",
            box=box.SIMPLE_HEAD,
        )  # fmt: skip
        table.add_column("approximation", no_wrap=True)
        table.add_column("of which there are", no_wrap=True)
        for count in counts:
            table.add_column(str(count), justify="right")
        for name in dict.fromkeys(r["mechanism"] for r in own):
            cells = {r["count"]: r for r in own if r["mechanism"] == name}
            errors = (digits(cells.get(count, {}).get("error")) for count in counts)
            table.add_row(name, next(iter(cells.values()))["of"], *errors)
        console.print(table)
    table = Table(
        title="estimates of e^(q·k / √K) over it, one feature", title_justify="left",
        box=box.SIMPLE_HEAD,
    )  # fmt: skip
    for head in ("queries and keys", "features"):
        table.add_column(head, no_wrap=True)
    for head in ("variance", "predicted", "bias in standard errors"):
        table.add_column(head, justify="right")
    for r in result["features"]:
        numbers = (r["variance"], r["predicted"], r["bias_in_errors"])
        table.add_row(r["data"], r["features"], *map(digits, numbers))
    console.print(table)


def _kinds(records: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(r["data"] for r in records))


@styled
def plot(result: dict[str, Any]) -> bytes:
    """A PNG: a panel for each kind of queries and keys, both axes logarithmic."""
    kinds = _kinds(result["records"])
    figure, panels = panel_rows(
        [len(kinds)], panel=(3.0, 2.9), title="approximations of softmax attention"
    )
    for axes, data in zip(panels[0], kinds, strict=True):
        own = [r for r in result["records"] if r["data"] == data and r["error"]]
        for name, (color, marker, line) in _LOOKS.items():
            points = sorted((r["count"], r["error"]) for r in own if r["mechanism"] == name)
            if points:
                axes.plot(
                    *zip(*points, strict=True), color=color, marker=marker, markersize=4,
                    linestyle=line, markerfacecolor="white" if line == "--" else color,
                )  # fmt: skip
        axes.set_title(data)
        axes.set_xlabel("features, rank, landmarks or tokens")
        if own:
            log_axis(axes)
            lengths_axis(axes, sorted({r["count"] for r in own}))
    panels[0][0].set_ylabel("relative error beside softmax")
    handles = [
        Line2D(
            [], [], label=name, color=color, marker=marker, markersize=4, linestyle=line,
            markerfacecolor="white" if line == "--" else color,
        )
        for name, (color, marker, line) in _LOOKS.items()
    ]  # fmt: skip
    legend_below(figure, handles)
    return render(figure)
