"""Figures of `rankone icl experiment`."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.lines import Line2D

from rankone.icl.experiments.minima import landscape
from rankone.icl.experiments.real_data import SETS
from rankone.icl.experiments.transfer import AXES
from rankone.icl.gdpp import eigenvalue_nodes
from rankone.report.figures.files import render
from rankone.report.figures.style import (
    COLORS,
    MARKERS,
    legend_below,
    line_style,
    log_axis,
    panel_rows,
    styled,
)
from rankone.report.records import LABELS, parse_noise
from rankone.tasks.noise import noise_from_name

Record = dict[str, Any]
_LEAST, _MOST = 1e-4, 30.0
"""What is drawn of losses; others are at the edge."""
_NAMES = {"least squares": "#6E6E6E", "ridge, left out": "#7A6A00", "mean label": "#BDBDBD"}


@styled
def fig_minima(records: list[Record]) -> bytes:
    """A PNG: the loss over the two numbers of the first layer, the second layer at its best."""
    noises = list(dict.fromkeys(r["noise"] for r in records))
    figure, panels = panel_rows(
        [len(noises)],
        panel=(3.2, 2.9),
        title="GD++ with two layers: loss, the last step at its best",
    )
    values = eigenvalue_nodes(10, 20)
    for axes, noise in zip(panels[0], noises, strict=True):
        variance = noise_from_name(noise).mean_square
        x, y, loss = (part.numpy() for part in landscape(values, variance, 10))
        own = [r for r in records if r["noise"] == noise]
        least = own[0]["loss"]
        levels = least * np.array([1.002, 1.01, 1.03, 1.08, 1.2, 1.5, 2.0, 3.0, 5.0])
        axes.contourf(x, y, np.log(loss.T), levels=np.log(levels), cmap="viridis", extend="both")
        axes.contour(x, y, loss.T, levels=levels, colors="white", linewidths=0.4)
        for r in own:
            if x.min() <= r["w_xx"] <= 0 and y.min() <= r["w_yx_first"] <= 0:
                axes.plot(r["w_xx"], r["w_yx_first"], "o", color="#D55E00", markersize=5)
                axes.annotate(
                    f"{r['loss']:.3f} ({r['starts']})", (r["w_xx"], r["w_yx_first"]),
                    textcoords="offset points", xytext=(0, 7), fontsize=7.5, color="white",
                    ha="center",
                )  # fmt: skip
        axes.set_title(parse_noise(noise).sentence)
        axes.set_xticks([-0.03, -0.02, -0.01, 0.0])
        axes.set_xlabel("w_xx, first layer")
    panels[0][0].set_ylabel("w_yx, first layer")
    return render(figure)


@styled
def fig_transfer(records: list[Record], noise: str) -> bytes:
    """A PNG: median losses above the ridge that knows the noise, a panel for each thing changed."""
    figure, panels = panel_rows(
        [len(AXES)], panel=(2.8, 2.6),
        title=f"Models trained on {parse_noise(noise).sentence}, elsewhere: median adjusted loss",
    )  # fmt: skip
    names = list(dict.fromkeys(r["model"] for r in records))
    for axes, (axis, (told, _)) in zip(panels[0], AXES.items(), strict=True):
        own = [r for r in records if r["axis"] == axis]
        for name in names:
            points = [
                (r["value"], min(max(r["median"], _LEAST), _MOST))
                for r in own
                if r["model"] == name
            ]
            if points:
                axes.plot(
                    *zip(*points, strict=True), marker=MARKERS.get(name, ""), markersize=4,
                    **line_style(name),
                )  # fmt: skip
        log_axis(axes)
        if axis != "noise":
            axes.set_xscale("log")
            ticks = sorted({r["value"] for r in own})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
        axes.set_xlabel(told)
    panels[0][0].set_ylabel("median of loss above the oracle's")
    handles = [
        Line2D([], [], label=_told(name), marker=MARKERS.get(name, ""), markersize=4,
               **line_style(name))
        for name in names
    ]  # fmt: skip
    legend_below(figure, handles)
    return render(figure)


def _told(name: str) -> str:
    """Bayes is no floor where its prior is wrong."""
    return "Bayes, for the noise of training" if name == "bayes" else LABELS[name]


@styled
def fig_real_data(records: list[Record], noise: str) -> bytes:
    """A PNG: mean squared errors over the variance of the labels, a panel for each data set."""
    figure, panels = panel_rows(
        [len(SETS)], panel=(3.4, 2.6),
        title=f"Models trained on {parse_noise(noise).sentence}, on rows of data sets",
    )  # fmt: skip
    for axes, data in zip(panels[0], SETS, strict=True):
        own = sorted((r for r in records if r["data"] == data), key=lambda r: -r["error"])
        heights = np.arange(len(own))
        colors = [COLORS.get(r["model"]) or _NAMES[r["model"]] for r in own]
        most = 1.6
        axes.barh(heights, [min(r["error"], most) for r in own], color=colors, height=0.7)
        for height, r in zip(heights.tolist(), own, strict=True):
            text = f"{r['error']:.3f} ± {r['standard_error']:.3f}"
            if r["error"] > most:
                text = f"explodes; median {r['median']:.3f}"
            axes.text(min(r["error"], most) + 0.02, height, text, va="center", fontsize=7)
        names: dict[str, str] = {**LABELS, "bayes": "Bayes"}
        labels = [str(names.get(r["model"], r["model"])) for r in own]
        axes.set_yticks(heights, labels)
        axes.set_xlim(0, most + 0.9)
        axes.set_title(data)
        axes.set_xticks([0.0, 0.5, 1.0, 1.5])
        axes.set_xlabel("squared error / variance of labels")
    return render(figure)
