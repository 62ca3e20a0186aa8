"""Loss against the noise's standard deviation (Figures 2 and 6)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankone.report.curves import Curve, Curves, Field
from rankone.report.figures.style import (
    legend_below,
    line_style,
    model_handles,
    panel_rows,
    shade,
    split_rows,
    styled,
    training_handle,
)
from rankone.report.records import (
    BASELINES,
    MODELS,
    Noise,
    NothingToShowError,
    Record,
    layers_label,
)

PROFILED = (*BASELINES, *MODELS, "bayes")
# GD++ and ConstRR assume one noise level for all and leave any useful range away from it.
_ADAPTIVE = ("diag", "full", "adarr", "tunedrr", "bayes")


@styled
def fig2(records: Iterable[Record]) -> Figure:
    """Figure 2: profiles of the deepest models for each uniform noise, then depth by depth.

    The lower row shows U(0, 5), or the nearest uniform noise among the records.
    """
    curves = Curves(records)
    noises = [noise for noise in curves.uniform() if profiled_depths(curves, noise)]
    if not noises:
        raise NothingToShowError("figure 2 needs profiles of models trained on a uniform noise")
    reference = min(noises, key=lambda noise: abs(noise.largest - 5))
    upper = split_rows(noises)
    depths = panel_depths(curves, reference)
    deepest = common_depth(curves, noises)
    title = f"Adjusted loss at fixed noise, {layers_label(deepest)}"
    if lower := [len(depths)] * (len(depths) > 1):
        title += f" (top); {reference.sentence} by depth (bottom)"
    figure, panels = panel_rows([*map(len, upper), *lower], title=title)
    for axes_row, noise_row in zip(panels, upper, strict=False):
        for axes, noise in zip(axes_row, noise_row, strict=True):
            draw_profiles(axes, curves, noise, deepest, noise.largest + 1)
            axes.set_title(noise.sentence)
    if lower:
        draw_by_depth(panels[-1], curves, reference, depths, reference.largest + 1)
    label_outer(panels, "adjusted loss")
    legend_below(figure, [*model_handles((*MODELS, *BASELINES, "bayes")), training_handle(noises)])
    return figure


@styled
def fig6(records: Iterable[Record]) -> Figure:
    """Figure 6: the loss itself, not adjusted, against the noise, a panel for each depth."""
    curves = Curves(records)
    noise = curves.reference_noise()
    depths = panel_depths(curves, noise)
    if not depths:
        raise NothingToShowError(f"figure 6 needs profiles of models trained on {noise.label}")
    models = (*PROFILED, "oracle")
    rows = split_rows(depths)
    title = f"Loss at fixed noise, {noise.sentence}"
    figure, panels = panel_rows([len(row) for row in rows], panel=(2.6, 2.2), title=title)
    for axes_row, depth_row in zip(panels, rows, strict=True):
        for axes, depth in zip(axes_row, depth_row, strict=True):
            draw_curves(axes, curves, noise, depth, noise.largest + 1, models, "loss")
            axes.set_ylim(0, noise.largest + 1)
            axes.set_title(layers_label(depth))
    label_outer(panels, "loss")
    legend_below(
        figure, [*model_handles((*MODELS, *BASELINES, "bayes", "oracle")), training_handle([noise])]
    )
    return figure


def draw_profiles(axes: Axes, curves: Curves, noise: Noise, depth: int, end: float) -> None:
    """One panel of adjusted losses from no noise to `end`; its range shows the good ones."""
    found = draw_curves(axes, curves, noise, depth, end, PROFILED)
    axes.set_ylim(0, _limit([found], noise))


def draw_by_depth(
    row: Sequence[Axes], curves: Curves, noise: Noise, depths: Sequence[int], end: float
) -> None:
    """A row of panels by depth, all on one scale."""
    found = [
        draw_curves(axes, curves, noise, depth, end, PROFILED)
        for axes, depth in zip(row, depths, strict=True)
    ]
    limit = _limit(found, noise)
    for index, (axes, depth) in enumerate(zip(row, depths, strict=True)):
        axes.set_ylim(0, limit)
        axes.set_title(
            f"{noise.sentence}, {layers_label(depth)}" if index == 0 else layers_label(depth)
        )
        if index:
            axes.tick_params(labelleft=False)


def draw_curves(
    axes: Axes,
    curves: Curves,
    noise: Noise,
    depth: int,
    end: float,
    models: Sequence[str],
    field: Field = "adjusted_loss",
) -> dict[str, Curve]:
    """Draws the best seeds' profiles and the closed forms', and returns what it drew."""
    found = {}
    for model in models:
        curve = curves.profile(model, depth if model in MODELS else None, noise, field)
        if curve is None:
            continue
        found[model] = curve.until(end)
        axes.plot(found[model].x, found[model].y, **line_style(model))
    shade(axes, noise)
    axes.set_xlim(0, end)
    axes.set_xticks(np.arange(0, end + 0.5, 1 if end <= 4 else 2))
    return found


def profiled_depths(curves: Curves, noise: Noise) -> list[int]:
    """Depths at which some trained kind has a profile."""
    return [
        depth
        for depth in curves.depths(noise, MODELS)
        if any(curves.profile(model, depth, noise) for model in MODELS)
    ]


def panel_depths(curves: Curves, noise: Noise) -> list[int]:
    """The depths of a row of panels: 2 to 7, or what there is."""
    depths = profiled_depths(curves, noise)
    return [depth for depth in depths if 2 <= depth <= 7] or depths[:6]


def common_depth(curves: Curves, noises: Sequence[Noise]) -> int:
    """The deepest models that all these noises have in common."""
    shared = set.intersection(*(set(profiled_depths(curves, noise)) for noise in noises))
    return max(shared) if shared else max(max(profiled_depths(curves, noise)) for noise in noises)


def label_outer(panels: Sequence[Sequence[Axes]], ylabel: str) -> None:
    """Names the axes at the left and at the bottom only."""
    for row in panels:
        row[0].set_ylabel(ylabel)
    for axes in panels[-1]:
        axes.set_xlabel("noise standard deviation σ")


def _limit(found: Sequence[dict[str, Curve]], noise: Noise) -> float:
    """The top of the axis, as in the paper: the adaptive methods inside the training range fit,
    and of every panel at least half of the best trained curve is seen.
    """
    # Without noise nothing but AdaRR keeps its loss beyond the training range, which is a point.
    models = _ADAPTIVE if noise.largest > 0 else ("adarr",)
    high = min((_reach(curves, noise, models) for curves in found), default=0.0)
    for curves in found:
        inside = [_inside(curves[model], noise) for model in MODELS if model in curves]
        medians = [float(np.median(values)) for values in inside if values.size]
        high = max(high, min(medians, default=0.0))
    return 1.25 * high if high > 0 else 1.0


def _reach(curves: dict[str, Curve], noise: Noise, models: Sequence[str]) -> float:
    """What these models hardly exceed inside the training range, wherever a single one explodes."""
    values = [_inside(curves[model], noise) for model in models if model in curves]
    values = values or [_inside(curve, noise) for curve in curves.values()]
    return max((float(np.quantile(v, 0.95)) for v in values if v.size), default=0.0)


def _inside(curve: Curve, noise: Noise) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    # A range that is one point tells nothing of the curve: without noise the whole panel counts.
    end = noise.largest if noise.largest > 0 else np.inf
    return curve.y[curve.x <= end + 1e-9]
