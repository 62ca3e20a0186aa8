"""Adjusted loss against the number of layers (Figure 1 and the left of Figure 3)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rankone.report.curves import Curves
from rankone.report.figures.style import (
    COLORS,
    MARKERS,
    legend_below,
    line_style,
    log_axis,
    model_handles,
    panel_rows,
    split_rows,
    styled,
)
from rankone.report.records import (
    BASELINES,
    LABELS,
    MODELS,
    Noise,
    NothingToShowError,
    Record,
    TableRecord,
)


@styled
def fig1(records: Iterable[Record], table: Iterable[TableRecord] = ()) -> Figure:
    """Figure 1: adjusted loss against depth, one panel for each uniform noise.

    `table` holds the published values, drawn as rings, and floors where no Bayes record is.
    """
    curves, cells = Curves(records), list(table)
    noises = [noise for noise in curves.uniform() if curves.depths(noise, MODELS)]
    if not noises:
        raise NothingToShowError("figure 1 needs trained models for a uniform noise, e.g. sigma_5")
    rows = split_rows(noises)
    figure, panels = panel_rows([len(row) for row in rows], title="Adjusted loss against depth")
    for axes_row, noise_row in zip(panels, rows, strict=True):
        for axes, noise in zip(axes_row, noise_row, strict=True):
            draw_depth(axes, curves, cells, noise)
        axes_row[0].set_ylabel("adjusted loss")
    for axes in panels[-1]:
        axes.set_xlabel("layers")
    legend_below(figure, depth_handles(cells))
    return figure


def draw_depth(axes: Axes, curves: Curves, table: list[TableRecord], noise: Noise) -> None:
    """One panel: best seeds as lines, other seeds as dots, published values as rings."""
    shown = [_draw_model(axes, curves, table, noise, model) for model in MODELS]
    zeros = [
        model
        for model in (*BASELINES, "bayes")
        if not _draw_level(axes, curves, table, noise, model, shown)
    ]
    if zeros:
        names = ", ".join(LABELS[model].split(" ")[0] for model in zeros)
        names = "closed forms and floor" if len(zeros) == 4 else names
        axes.annotate(
            f"{names}: 0", (0.03, 0.03), xycoords="axes fraction", fontsize=7, color="#444444"
        )
    depths = curves.depths(noise, MODELS)
    axes.set_xticks(depths)
    axes.set_xlim(min(depths) - 0.5, max(depths) + 0.5)
    axes.set_title(noise.sentence)
    _set_limits(axes, [value for values in shown for value in values])
    log_axis(axes)


def depth_handles(table: list[TableRecord]) -> list[Artist]:
    """Legend entries of a depth panel."""
    handles = model_handles((*MODELS, *BASELINES, "bayes"), markers=True)
    handles.append(
        Line2D(
            [], [], color="#555555", marker="o", markersize=2.2, linestyle="", label="other seeds"
        )
    )
    if any(cell["published"] is not None for cell in table):
        handles.append(
            Line2D([], [], color="#555555", linestyle="", label="published (hollow)", **_RING)
        )
    return handles


_RING: dict[str, Any] = {
    "marker": "o",
    "markersize": 8.0,
    "markerfacecolor": "none",
    "markeredgewidth": 0.7,
}


def _draw_model(
    axes: Axes, curves: Curves, table: list[TableRecord], noise: Noise, model: str
) -> list[float]:
    """Draws one trained kind and returns the values that must be visible."""
    depths = curves.depths(noise, (model,))
    best = [(depth, curves.best(model, depth, noise)) for depth in depths]
    points = [(depth, value) for depth, value in best if value is not None and value > 0]
    for depth in depths:
        chosen = curves.best_seed(model, depth, noise)
        others = [
            v for s, v in curves.averages(model, depth, noise).items() if s != chosen and v > 0
        ]
        axes.plot(
            [depth + 0.16] * len(others),
            others,
            "o",
            color=COLORS[model],
            markersize=1.8,
            alpha=0.7,
        )
    axes.plot(*_columns(points), marker=MARKERS[model], markersize=4, **line_style(model))
    rings = [
        (cell["layers"], cell["published"])
        for cell in table
        if cell["noise"] == noise.name and cell["model"] == model and cell["published"]
    ]
    known = [(float(depth), value) for depth, value in rings if depth and value]
    ring = {**_RING, "marker": MARKERS[model], "alpha": 0.6}
    axes.plot(*_columns(known), linestyle="", color=COLORS[model], zorder=1.9, **ring)
    return [value for _, value in (*points, *known)]


def _draw_level(
    axes: Axes,
    curves: Curves,
    table: list[TableRecord],
    noise: Noise,
    model: str,
    shown: list[list[float]],
) -> bool:
    """Draws a baseline's level; False where it is zero, which no logarithmic axis shows."""
    level = curves.best(model, None, noise)
    if level is None:
        cells = [cell for cell in table if cell["noise"] == noise.name]
        own = [cell["adjusted_loss"] for cell in cells if cell["model"] == model]
        floors = [cell["floor"] for cell in cells if model == "bayes"]
        level = next((value for value in [*own, *floors] if value is not None), None)
    if level is None or math.isnan(level):
        return True
    # Without noise every closed form is exact; what is left is rounding.
    if level <= 0 or (noise.largest == 0 and level < 1e-9):
        return False
    axes.axhline(level, **line_style(model))
    shown.append([level])
    return True


def _columns(
    points: list[tuple[int, float]] | list[tuple[float, float]],
) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _set_limits(axes: Axes, values: list[float]) -> None:
    finite = [value for value in values if np.isfinite(value) and value > 0]
    if not finite:
        return
    low, high = min(finite), max(finite)
    # A range of many decades belongs to the case without noise, where a line of text lies below.
    wide = high / low > 1e4
    axes.set_ylim(low / (100 if wide else 1.6), high * (10 if wide else 1.6))
