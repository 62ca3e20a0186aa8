"""Time and memory against T, both axes logarithmic; alone here matplotlib is imported."""

from __future__ import annotations

from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from rankone.bench.cases import OPS, OURS, Record
from rankone.bench.summary import entries
from rankone.report.figures.files import render
from rankone.report.figures.style import COLORS, legend_below, log_axis, panel_rows, styled

_LOOKS = {
    "triton": (COLORS["full"], "^"),
    "chunked": (COLORS["tunedrr"], "o"),
    "fla": (COLORS["gd++"], "s"),
    "sdpa": (COLORS["oracle"], "D"),
    "sdpa_cudnn": (COLORS["adarr"], "P"),
    "transformers": (COLORS["diag"], "v"),
}
_TITLES = {"linear_attention": "linear attention", "delta_rule": "delta rule"}


@styled
def plot(result: dict[str, Any]) -> bytes:
    """A PNG: a row for each operation; forward, both passes, and the memory of both passes.

    Where batches differ in size, times and memory are those of a token.
    """
    records = [r for r in result["records"] if r["ms"]]
    ops = [op for op in OPS if any(r["op"] == op for r in records)]
    token = len({r["B"] for r in records}) > 1
    title = f"{result['device']}, {records[0]['dtype']}"
    figure, panels = panel_rows([3] * len(ops), panel=(2.6, 2.3), title=title)
    for op, row in zip(ops, panels, strict=True):
        mine = [r for r in records if r["op"] == op]
        both = [r for r in mine if r["pass"] == "forward_backward"]
        _panel(row[0], [r for r in mine if r["pass"] == "forward"], "ms", token)
        _panel(row[1], both, "ms", token)
        _panel(row[2], both, "peak_gib", token)
        row[0].set_title(f"{_TITLES[op]}: forward")
        row[1].set_title("forward and backward")
        row[2].set_title("memory of both passes")
    for axes in panels[-1]:
        axes.set_xlabel("tokens of a sequence, T")
    legend_below(figure, _handles(records))
    return render(figure)


def _panel(axes: Axes, records: list[Record], name: str, token: bool) -> None:
    scale, unit = {
        ("ms", False): (1.0, "ms"),
        ("ms", True): (1e6, "ns a token"),
        ("peak_gib", False): (1.0, "GiB"),
        ("peak_gib", True): (2.0**20, "KiB a token"),
    }[name, token]
    for impl, decay in entries(records):
        found = sorted(
            (r["T"], scale * r[name] / (r["B"] * r["T"] if token else 1))
            for r in records
            if (r["impl"], r["decay"]) == (impl, decay) and r[name] is not None
        )
        if found:
            axes.plot(*zip(*found, strict=True), **_look(impl, decay))
    axes.set_ylabel(unit)
    if records:
        log_axis(axes)
        lengths_axis(axes, sorted({r["T"] for r in records}))


def lengths_axis(axes: Axes, lengths: list[int]) -> None:
    """A logarithmic axis of powers of two, at most five of them labelled."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths[:: -(-len(lengths) // 5)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda T, _: f"{T / 1024:g}k" if T >= 1024 else f"{T:g}")
    )


def _look(impl: str, decay: bool) -> dict[str, Any]:
    """Colour and sign by implementation, ours above the others; with decay dashed and hollow."""
    color, marker = _LOOKS[impl]
    return {
        "color": color,
        "marker": marker,
        "markersize": 4,
        "zorder": 3 if impl in OURS else 2,
        "linestyle": (0, (4, 2)) if decay else "-",
        "markerfacecolor": "white" if decay else color,
    }


def _handles(records: list[Record]) -> list[Artist]:
    return [
        Line2D([], [], label=impl + (" with decay" if decay else ""), **_look(impl, decay))
        for impl, decay in entries(records)
    ]
