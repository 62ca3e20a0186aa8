"""Figures 1 to 7 of Ahn et al. 2023, drawn from our models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from rankone.icl.ahn.records import Record
from rankone.report.figures.style import legend_below, steps_colormap, styled

Array = NDArray[np.float64]
INK = "#444444"
TRAINED, GD, PGD, OLS = "#D55E00", "#0072B2", "#009E73", "#000000"
METHODS = {"gd": (GD, "gradient descent"), "pgd": (PGD, "preconditioned, Σ⁻¹"), "ols": (OLS, "OLS")}


@styled
def loss_figure(
    title: str, steps: Array, losses: Array, switch: int, levels: dict[str, float]
) -> Figure:
    """Figures 1 and 3: log loss on fresh prompts against iterations, mean and deviation over seeds.

    `losses` is [T, R]; from `switch` on all prompts are used; `levels` are dashed lines.
    """
    figure = Figure(figsize=(5.0, 3.2), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots()
    _band(axes, steps, np.log(losses), TRAINED, "mean over seeds, ± deviation")
    for (name, level), dashes in zip(levels.items(), ("--", ":"), strict=False):
        axes.axhline(math.log(level), color=INK, linewidth=1.0, linestyle=dashes, label=name)
    _mark_switch(axes, switch)
    axes.set_xlabel("iteration")
    axes.set_ylabel("log loss")
    axes.set_xlim(0, steps[-1])
    axes.grid(axis="y", color="#E3E3E3", linewidth=0.5)
    legend_below(figure, axes.get_legend_handles_labels()[0])
    return figure


@styled
def matrices_figure(
    title: str,
    names: Sequence[str],
    steps: Array,
    distances: Array,
    switch: int,
    matrices: Array,
    published: Sequence[float],
) -> Figure:
    """Figures 2, 4 and 5: distance to the identity against iterations, and the final matrices.

    `distances` is [T, R, K] for K matrices, `matrices` [K, d, d] those of one model.
    """
    count = len(names)
    figure = Figure(figsize=(max(2.3 * count, 5.0), 4.9), layout="constrained")
    figure.suptitle(title)
    above, below = figure.subfigures(2, 1, height_ratios=(1.0, 1.05), squeeze=False)[:, 0]
    axes = above.subplots()
    for k, color in enumerate(steps_colormap(count)):
        _band(axes, steps, distances[:, :, k], color, names[k])
    _mark_switch(axes, switch)
    axes.set_xlabel("iteration")
    axes.set_ylabel("distance to identity")
    axes.set_xlim(0, steps[-1])
    axes.set_ylim(0, 1)
    axes.legend(loc="upper right")
    panels = below.subplots(1, count, squeeze=False)[0]
    reach = float(np.abs(matrices).max())
    for panel, name, matrix, value in zip(panels, names, matrices, published, strict=True):
        _heat_map(panel, matrix, reach)
        panel.set_title(f"{name}, published {value:.2f} I".replace("-", "−"))
    return figure


def _heat_map(axes: Axes, matrix: Array, reach: float) -> None:
    own = float(np.abs(matrix).max()) or reach
    axes.imshow(matrix, cmap="RdBu_r", vmin=-1.3 * own, vmax=1.3 * own, interpolation="nearest")
    for (row, column), value in np.ndenumerate(matrix):
        shown = f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−")
        axes.text(column, row, shown, ha="center", va="center", fontsize=6.5)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(True)


def _band(axes: Axes, steps: Array, values: Array, color: Any, label: str) -> None:
    mean, deviation = values.mean(1), values.std(1)
    axes.plot(steps, mean, color=color, label=label)
    axes.fill_between(
        steps, mean - deviation, mean + deviation, color=color, alpha=0.2, linewidth=0
    )


def _mark_switch(axes: Axes, switch: int) -> None:
    axes.axvline(switch, color="#BDBDBD", linewidth=1.0, zorder=0, label="_")


@styled
def fig6(records: Sequence[Record]) -> Figure:
    """Figure 6: loss against the number of examples, three layers beside three steps.

    Thick lines see all n examples; thin lines see n - 1, as the authors' baselines do.
    """
    figure = Figure(figsize=(7.6, 3.9), layout="constrained")
    figure.suptitle("Figure 6: expected loss against the number of examples, 3 layers or steps")
    for axes, scale in zip(figure.subplots(1, 2), ("linear", "log"), strict=True):
        for method, (color, name) in METHODS.items():
            for fewer in (0, 1):
                points = [
                    (r["examples"], r["expected_loss"])
                    for r in records
                    if (r["record"], r.get("method"), r.get("layers")) == ("baseline", method, 3)
                    and r["given"] == r["examples"] - fewer
                ]
                style = {"linewidth": 0.7, "alpha": 0.8} if fewer else {"label": name}
                axes.plot(*zip(*sorted(points), strict=True), color=color, **style)
        _trained(axes, records, "examples", "expected_loss", ("examples-", "theorem4-exp"))
        _optimum(axes, records, "examples")
        axes.set_xlabel("examples n")
        axes.set_yscale(scale)
        axes.set_xticks(sorted({r["examples"] for r in records if r["record"] == "baseline"}))
        axes.grid(axis="y", color="#E3E3E3", linewidth=0.5)
    first, second = figure.axes
    first.set_ylabel("loss")
    first.set_ylim(bottom=0)
    second.set_ylim(bottom=3e-4)
    handles = first.get_legend_handles_labels()[0]
    (thin,) = first.plot([], [], color=INK, linewidth=0.7, label="thin: baselines given n − 1")
    legend_below(figure, [*handles, thin])
    return figure


@styled
def fig7(records: Sequence[Record]) -> Figure:
    """Figure 7: log loss against layers, beside as many steps of gradient descent."""
    figure = Figure(figsize=(5.0, 3.9), layout="constrained")
    figure.suptitle("Figure 7: log loss against layers, n = 20")
    axes = figure.subplots()
    for method in ("gd", "pgd"):
        color, name = METHODS[method]
        points = [
            (r["layers"], math.log(r["expected_loss"]))
            for r in records
            if (r["record"], r.get("method"), r.get("examples")) == ("baseline", method, 20)
            and r["given"] == 20
        ]
        axes.plot(*zip(*sorted(points), strict=True), color=color, marker=".", label=name)
    for trained_for, key, color, name in (
        ("sample", "median_loss", "#E69F00", "trained on a sample: median draw"),
        ("expectation", "expected_loss", TRAINED, "trained for the expectation: expectation"),
    ):
        chosen = [r for r in records if r.get("trained_for") == trained_for]
        _trained(axes, chosen, "layers", key, ("layers-", "theorem4"), name, color, logarithm=True)
    _optimum(axes, records, "layers", logarithm=True)
    axes.set_xlabel("layers")
    axes.set_ylabel("log loss")
    axes.set_xticks(sorted({r["layers"] for r in records if r["record"] == "optimum"}))
    axes.grid(axis="y", color="#E3E3E3", linewidth=0.5)
    legend_below(figure, axes.get_legend_handles_labels()[0])
    return figure


def _trained(
    axes: Axes,
    records: Sequence[Record],
    across: str,
    key: str,
    experiments: tuple[str, ...],
    label: str = "trained",
    color: str = TRAINED,
    *,
    logarithm: bool = False,
) -> None:
    """Best seeds as a line, the others as dots."""
    found: dict[int, list[float]] = {}
    for r in records:
        if r["record"] == "model" and r["experiment"].startswith(experiments) and r[key]:
            value = math.log(r[key]) if logarithm else r[key]
            found.setdefault(r[across], []).append(value)
    where = sorted(found)
    axes.plot(where, [min(found[x]) for x in where], "o-", color=color, markersize=3.5, label=label)
    for x in where:
        rest = sorted(found[x])[1:]
        axes.plot([x] * len(rest), rest, ".", color=color, markersize=3, alpha=0.7)


def _optimum(
    axes: Axes, records: Sequence[Record], across: str, *, logarithm: bool = False
) -> None:
    """The exact optimum of the family, as rings."""
    chosen = [
        r
        for r in records
        if (r["record"], r.get("rank"), r.get("family")) == ("optimum", 0, "theorem4")
        and (r["layers"] == 3 if across == "examples" else r["examples"] == 20)
    ]
    points = sorted((r[across], math.log(r["loss"]) if logarithm else r["loss"]) for r in chosen)
    axes.plot(
        *zip(*points, strict=True),
        "o",
        markersize=8,
        markerfacecolor="none",
        markeredgecolor=INK,
        markeredgewidth=0.8,
        linestyle="",
        label="exact optimum in expectation",
    )


__all__ = ["fig6", "fig7", "loss_figure", "matrices_figure"]
