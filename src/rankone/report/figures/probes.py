"""What layers do to their implicit weights, against depth (`rankone icl explain`)."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from rankone.report.figures.files import render
from rankone.report.figures.style import MARKERS, legend_below, panel_rows, steps_colormap, styled
from rankone.report.records import LABELS

Record = dict[str, Any]
PANELS = (
    ("adjusted_loss", "adjusted loss"),
    ("step", "step along the gradient × n"),
    ("ridge_variance", "acts as if σ² ="),
    ("precondition_low", "features: least of M"),
    ("momentum", "labels in features, |u| √n"),
    ("rescaling", "rescaling, 1 + d"),
)
_LOGARITHMIC = ("adjusted_loss", "ridge_variance")
_LEAST = {"adjusted_loss": 1e-4, "ridge_variance": 1e-2}


@styled
def fig_probes(records: list[Record]) -> bytes:
    """A PNG: a row for each model, a panel for each quantity, a colour for each noise level.

    Dashed lines in the panel of noise are the true σ².
    """
    models = list(dict.fromkeys((r["model"], r["layers"]) for r in records))
    levels = sorted({r["sigma"] for r in records})
    colors = dict(zip(levels, steps_colormap(len(levels)), strict=False))
    first = records[0]
    figure, rows = panel_rows(
        [len(PANELS)] * len(models), panel=(2.2, 1.9), title=f"Layers trained on {first['noise']}"
    )
    for axes_row, (model, layers) in zip(rows, models, strict=True):
        own = [r for r in records if (r["model"], r["layers"]) == (model, layers)]
        for axes, (name, title) in zip(axes_row, PANELS, strict=True):
            _panel(axes, own, name, colors)
            if axes_row is rows[0]:
                axes.set_title(title)
            if axes_row is rows[-1]:
                axes.set_xlabel("layer")
        axes_row[0].set_ylabel(LABELS[model])
    handles = [
        Line2D([], [], color=color, marker="o", markersize=4, label=f"σ² = {sigma**2:g}")
        for sigma, color in colors.items()
    ]
    legend_below(figure, handles)
    return render(figure)


def _panel(axes: Axes, records: list[Record], name: str, colors: dict[float, Any]) -> None:
    least = _LEAST.get(name, -math.inf)
    for sigma, color in colors.items():
        points = [
            (r["layer"], max(r[name], least))
            for r in records
            if r["sigma"] == sigma and r[name] is not None and math.isfinite(r[name])
        ]
        if points:
            marker = MARKERS[records[0]["model"]]
            axes.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=4)
        if name == "ridge_variance" and sigma > 0:
            axes.axhline(sigma**2, color=color, linewidth=0.9, linestyle=(0, (4, 3)))
    if name in _LOGARITHMIC:
        axes.set_yscale("log")
    axes.set_xticks(sorted({r["layer"] for r in records}))
    axes.grid(axis="y", color="#E3E3E3", linewidth=0.5)
