"""Tables and the picture of `rankone bench scaling`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from rich import box
from rich.console import Console
from rich.table import Table

from rankone.bench.plots import lengths_axis
from rankone.bench.scaling import PASSES, Key, Record, lines
from rankone.bench.summary import digits
from rankone.provenance import TOLERATED_CORES
from rankone.report.figures.files import render
from rankone.report.figures.style import legend_below, log_axis, panel_rows, styled
from rankone.storage import write_bytes

LABELS = {"forward": "forward", "training_step": "training step"}
_COLORS = {
    "softmax": "#000000", "linear": "#D55E00", "performer": "#CC79A7", "rfa": "#E69F00",
    "linformer": "#56B4E9", "nystromformer": "#0072B2", "longformer": "#009E73",
    "bigbird": "#7A6A00", "long_short": "#6E6E6E",
}  # fmt: skip
_MARKERS = dict(zip(_COLORS, "oD^vsPX*p", strict=True))


def publish(path: Path, result: dict[str, Any]) -> Path:
    """Prints the tables and draws the plot beside the file."""
    show(result)
    picture = path.with_suffix(".png")
    write_bytes(picture, plot(result))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{result['seconds']:.0f} s; {path} and {picture.name}")
    return path


def show(result: dict[str, Any]) -> None:
    """A table for each pass: times, exponents, where softmax attention is overtaken."""
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=180, highlight=False)
    records = result["records"]
    first = records[0]
    sizes = f"D = {first['D']}, H = {first['H']}, {first['dtype']}"
    all_lengths = sorted({r["T"] for r in records})
    for name in PASSES:
        table = Table(
            title=f"{LABELS[name]}, {sizes}, {result['device']}: ms", title_justify="left",
            box=box.SIMPLE_HEAD,
        )  # fmt: skip
        table.add_column("mechanism", no_wrap=True)
        heads = [*map(str, all_lengths), "time ~ T^", "GiB", "memory ~ T^", "overtakes at"]
        for head in heads:
            table.add_column(head, justify="right", no_wrap=True)
        for key in lines():
            table.add_row(str(key), *_cells(result, key, name, all_lengths))
        console.print(table)
    for record in result["left_out"]:
        key = Key(record["mechanism"], record["causal"])
        part = f"{key}, {LABELS[record['pass']]}, from T = {record['from_T']}"
        console.print(f"left out: {part}: {record['why']}")
    others = result["other_cores"] or 0.0
    if others > TOLERATED_CORES and first["device"] == "cpu":
        console.print(f"Do not trust these times: other programs kept {others} cores busy.")


def _cells(result: dict[str, Any], key: Key, name: str, all_lengths: list[int]) -> list[str]:
    def own(part: str) -> list[Record]:
        wanted = (*key, name)
        return [r for r in result[part] if (r["mechanism"], r["causal"], r["pass"]) == wanted]

    times = {r["T"]: r for r in own("records")}
    cells = [digits(times.get(T, {}).get("ms")) for T in all_lengths]
    fit = next(iter(own("exponents")), {})
    last = times[max(times)]["peak_gib"] if times else None
    overtakes = next(iter(own("crossovers")), {})
    where = "–" if not overtakes else str(overtakes["T"] or "not yet")
    return [
        *cells, _two(fit.get("ms_exponent")), digits(last), _two(fit.get("peak_gib_exponent")),
        where,
    ]  # fmt: skip


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


@styled
def plot(result: dict[str, Any]) -> bytes:
    """A PNG: time and memory of both passes against T, both logarithmic."""
    records = result["records"]
    figure, panels = panel_rows(
        [2, 2], panel=(3.9, 2.9), title=f"{result['device']}, {records[0]['dtype']}"
    )
    for column, name in enumerate(PASSES):
        own = [r for r in records if r["pass"] == name]
        _panel(panels[0][column], own, "ms", "ms")
        _panel(panels[1][column], own, "peak_gib", "GiB")
        panels[0][column].set_title(LABELS[name])
        panels[1][column].set_xlabel("tokens of a sequence, T")
    present = {Key(r["mechanism"], r["causal"]) for r in records}
    handles = [Line2D([], [], label=str(key), **_look(key)) for key in lines() if key in present]
    legend_below(figure, handles)
    return render(figure)


def _panel(axes: Axes, records: list[Record], name: str, unit: str) -> None:
    for key in lines():
        found = sorted(
            (r["T"], r[name])
            for r in records
            if Key(r["mechanism"], r["causal"]) == key and r[name] is not None
        )
        if found:
            axes.plot(*zip(*found, strict=True), **_look(key))
    axes.set_ylabel(unit)
    if any(r[name] is not None for r in records):
        log_axis(axes)
        lengths_axis(axes, sorted({r["T"] for r in records}))


def _look(key: Key) -> dict[str, Any]:
    """Colour and sign by mechanism; causal ones are dashed and hollow."""
    color = _COLORS[key.mechanism]
    return {
        "color": color,
        "marker": _MARKERS[key.mechanism],
        "markersize": 4,
        "linestyle": (0, (4, 2)) if key.causal else "-",
        "markerfacecolor": "white" if key.causal else color,
    }
