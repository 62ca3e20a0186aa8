"""What all figures share: colours, markers, panels, legends."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from rankone.report.records import LABELS, Noise

T = TypeVar("T")

# Okabe and Ito's palette: distinct in every common form of colour blindness.
COLORS = {
    "gd++": "#0072B2",
    "diag": "#009E73",
    "full": "#D55E00",
    "constrr": "#56B4E9",
    "adarr": "#CC79A7",
    "tunedrr": "#E69F00",
    "bayes": "#000000",
    "oracle": "#6E6E6E",
}
MARKERS = {"gd++": "o", "diag": "s", "full": "^"}
DASHES: dict[str, Any] = {
    "constrr": (0, (6, 2)),
    "adarr": (0, (6, 2, 1.5, 2)),
    "tunedrr": (0, (1.5, 1.5)),
    "bayes": (0, (3, 2)),
    "oracle": "-",
}
SHADE = "#EBEBEB"

styled = matplotlib.rc_context(
    {
        "font.size": 9.0,
        "axes.titlesize": 9.5,
        "axes.labelsize": 9.0,
        "xtick.labelsize": 8.0,
        "ytick.labelsize": 8.0,
        "legend.fontsize": 9.0,
        "figure.titlesize": 11.0,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.7,
        "xtick.major.width": 0.7,
        "ytick.major.width": 0.7,
        "lines.linewidth": 1.5,
        "axes.axisbelow": True,
        "font.family": ["DejaVu Sans"],
    }
)
"""Decorates a function that draws: the settings hold while it runs, and nowhere else."""


def line_style(model: str) -> dict[str, Any]:
    """Colour and dashes of a model, the same in every figure.

    Dashes lie above the solid lines of trained models, so that equal curves are both seen.
    """
    width = {"bayes": 1.1, "oracle": 1.1}.get(model, 1.6 if model in MARKERS else 1.4)
    return {
        "color": COLORS[model],
        "linestyle": DASHES.get(model, "-"),
        "linewidth": width,
        "zorder": 2.0 if model in MARKERS or model == "oracle" else 2.2,
    }


def panel_rows(
    rows: Sequence[int], *, panel: tuple[float, float] = (2.3, 2.0), title: str
) -> tuple[Figure, list[list[Axes]]]:
    """A figure with `rows[i]` panels side by side in row i, all rows equally wide.

    A panel is never wider than a third of a figure of several columns: short rows are centred.
    """
    widest = max(rows)
    width, height = (5.0, 2.8 if len(rows) == 1 else 2.2) if widest == 1 else panel
    size = (max(width * widest, 5.0), height * len(rows) + 1.0)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(textwrap.fill(title, int(size[0] / 0.1)))
    # Rows of equal length are laid out together, so that their panels are equally high.
    groups = [(count, len(list(members))) for count, members in itertools.groupby(rows)]
    parts = figure.subfigures(
        len(groups), 1, height_ratios=[height for _, height in groups], squeeze=False
    )
    panels: list[list[Axes]] = []
    for part, (count, height) in zip(parts[:, 0], groups, strict=True):
        margin = max(0.0, min(widest, 3) / 2 - count / 2) if count < widest else 0.0
        ratios = [margin] * (margin > 0) + [1.0] * count + [margin] * (margin > 0)
        grid = GridSpec(height, len(ratios), figure=part, width_ratios=ratios)
        first = int(margin > 0)
        panels += [
            [part.add_subplot(grid[row, first + column]) for column in range(count)]
            for row in range(height)
        ]
    return figure, panels


def split_rows(items: Sequence[T], most: int = 4) -> list[Sequence[T]]:
    """Items in rows of at most `most`, as equally long as can be."""
    count = math.ceil(len(items) / most)
    length = math.ceil(len(items) / count)
    return [items[start : start + length] for start in range(0, len(items), length)]


def log_axis(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers where it spans few decades."""
    axes.set_yscale("log")
    axes.grid(axis="y", color="#E3E3E3", linewidth=0.5)
    axes.yaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    if math.log10(high / low) > 4:
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=12))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def shade(axes: Axes, noise: Noise) -> None:
    """Marks the standard deviations seen in training: a grey range, or lines for a set."""
    if noise.uniform and noise.largest > 0:
        axes.axvspan(0, noise.largest, color=SHADE, zorder=0, linewidth=0)
    elif noise.uniform:
        axes.axvline(0, color="#BDBDBD", linewidth=3, zorder=0)
    else:
        for value in noise.values:
            axes.axvline(value, color="#BDBDBD", linewidth=3, zorder=0)


def legend_below(figure: Figure, handles: Iterable[Artist]) -> None:
    """One legend for the whole figure, under the panels, in as few rows as fit."""
    entries = list(handles)
    # Inches: the sign and the gaps, then the letters.
    widths = [0.75 + 0.085 * len(str(entry.get_label())) for entry in entries]
    for rows in range(1, len(entries) + 1):
        columns = [max(widths[start : start + rows]) for start in range(0, len(widths), rows)]
        if sum(columns) <= figure.get_size_inches()[0] or len(columns) == 1:
            figure.legend(handles=entries, loc="outside lower center", ncols=len(columns))
            return


def model_handles(models: Iterable[str], *, markers: bool = False) -> list[Artist]:
    """Legend entries of models and baselines."""
    return [
        Line2D(
            [],
            [],
            label=LABELS[model],
            marker=MARKERS.get(model, "") if markers else "",
            markersize=5,
            **line_style(model),
        )
        for model in models
    ]


def training_handle(noises: Iterable[Noise]) -> Artist:
    """The legend entry of the shaded range, or of the marked values."""
    if any(noise.uniform for noise in noises):
        return Patch(color=SHADE, label="seen in training")
    return Line2D([], [], color="#BDBDBD", linewidth=3, label="seen in training")


def steps_colormap(count: int) -> list[tuple[float, float, float, float]]:
    """`count` colours from dark to bright that also print in order of grey."""
    colormap: Colormap = matplotlib.colormaps["viridis"]
    return [tuple(colormap(position)) for position in np.linspace(0.0, 0.9, max(count, 2))]
