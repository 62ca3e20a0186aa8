"""Predictions read after each layer (Figures 5 and 7)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rankone.report.curves import EXPLODED, Curve, Curves
from rankone.report.figures.style import (
    legend_below,
    line_style,
    log_axis,
    model_handles,
    panel_rows,
    shade,
    steps_colormap,
    styled,
    training_handle,
)
from rankone.report.records import LABELS, MODELS, Noise, NothingToShowError, Record, layers_label

END = 10.0
"""The profiles of the paper's Figure 7 end here."""


@styled
def fig5(records: Iterable[Record]) -> Figure:
    """Figure 5: adjusted loss of the prediction read after each layer, a line for each depth."""
    curves = Curves(records)
    noise = curves.reference_noise()
    models = [model for model in MODELS if _lines(curves, model, noise)]
    if not models:
        raise NothingToShowError(
            f"figure 5 needs losses after each layer for models on {noise.label}"
        )
    depths = sorted({depth for model in models for depth in _lines(curves, model, noise)})
    colors = dict(zip(depths, steps_colormap(len(depths)), strict=False))
    title = f"Adjusted loss of the prediction after each layer, {noise.sentence}"
    figure, panels = panel_rows([len(models)], panel=(2.9, 2.9), title=title)
    for axes, model in zip(panels[0], models, strict=True):
        for depth, line in _lines(curves, model, noise).items():
            _draw_decrease(axes, line, colors[depth])
        floor = curves.best("bayes", None, noise)
        if floor is not None and floor > 0:
            axes.axhline(floor, **line_style("bayes"))
        axes.set_xlabel("prediction read after layer")
        axes.set_xticks(range(max(depths) + 1))
        axes.set_title(LABELS[model])
        axes.set_yscale("log")
    panels[0][0].set_ylabel("adjusted loss")
    lines = [line for model in models for line in _lines(curves, model, noise).values()]
    _share_limits(panels[0], lines)
    handles = [
        Line2D([], [], color=colors[depth], marker="o", markersize=3, label=layers_label(depth))
        for depth in depths
    ]
    legend_below(figure, [*handles, *model_handles(["bayes"])])
    return figure


@styled
def fig7(records: Iterable[Record]) -> Figure:
    """Figure 7: profiles of the prediction read after each layer; rows are kinds, columns depths.

    Lines are medians over seeds, bands hold the middle half of them.
    """
    curves = Curves(records)
    noise = curves.reference_noise()
    models, depths = _profiled(curves, noise)
    if not models:
        raise NothingToShowError(
            f"figure 7 needs profiles after each layer for models on {noise.label}"
        )
    colors = steps_colormap(max(depths) + 1)
    title = f"Prediction after each layer, at fixed noise; {noise.sentence}"
    rows = [len(depths)] * len(models)
    figure, panels = panel_rows(rows, panel=(1.75, 1.75), title=title)
    for axes_row, model in zip(panels, models, strict=True):
        for axes, depth in zip(axes_row, depths, strict=True):
            _draw_layers(axes, curves, noise, model, depth, colors)
            axes.label_outer()
        axes_row[0].set_ylabel(f"{LABELS[model]}\nadjusted loss")
    for axes, depth in zip(panels[0], depths, strict=True):
        axes.set_title(layers_label(depth))
    for axes in panels[-1]:
        axes.set_xlabel("σ")
    handles = [
        Line2D([], [], color=color, label="no layer" if index == 0 else f"after {index}")
        for index, color in enumerate(colors)
    ]
    legend_below(figure, [*handles, training_handle([noise])])
    return figure


def _lines(curves: Curves, model: str, noise: Noise) -> dict[int, Curve]:
    lines = {
        depth: curves.by_layer(model, depth, noise) for depth in curves.depths(noise, (model,))
    }
    # A single point is the model's own prediction: nothing was read between the layers.
    return {depth: line for depth, line in lines.items() if line is not None and line.x.size > 1}


def _draw_decrease(axes: Axes, line: Curve, color: tuple[float, ...]) -> None:
    axes.errorbar(
        line.x,
        line.y,
        yerr=np.stack([line.y - line.low, line.high - line.y]),
        color=color,
        marker="o",
        markersize=3,
        linewidth=1.3,
        elinewidth=0.9,
        capsize=2,
    )


def _share_limits(row: list[Axes], lines: list[Curve]) -> None:
    """One logarithmic axis on which all medians are seen; a bar may leave it."""
    low = min(float(line.low[line.low > 0].min()) for line in lines if (line.low > 0).any())
    high = max(float(line.y[line.y < EXPLODED].max()) for line in lines)
    for index, axes in enumerate(row):
        axes.set_ylim(low / 1.4, 1.4 * high)
        log_axis(axes)
        if index:
            axes.tick_params(labelleft=False)


def _profiled(curves: Curves, noise: Noise) -> tuple[list[str], list[int]]:
    """Kinds and depths with a profile read before the last layer; one-layer models show nothing."""
    found = {
        (model, depth)
        for model in MODELS
        for depth in curves.depths(noise, (model,))
        if depth > 1
        and any(curves.seeds_profile(model, depth, noise, read) for read in range(1, depth))
    }
    models = [model for model in MODELS if any(model == kind for kind, _ in found)]
    return models, sorted({depth for _, depth in found})


def _draw_layers(
    axes: Axes,
    curves: Curves,
    noise: Noise,
    model: str,
    depth: int,
    colors: list[tuple[float, float, float, float]],
) -> None:
    end = 0.0
    for read_after in range(depth + 1):
        line = curves.seeds_profile(model, depth, noise, read_after)
        if line is None:
            continue
        color = colors[read_after]
        axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.25, linewidth=0)
        axes.plot(line.x, line.y, color=color, linewidth=1.9 if read_after == depth else 1.2)
        end = max(end, float(line.x.max()))
    shade(axes, noise)
    end = min(end, END) or END
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1])
    axes.set_xticks(np.arange(0, end + 0.5, 5 if end > 6 else 2))
