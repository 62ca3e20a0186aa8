"""Models trained on a set of noise levels (Figure 3)."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.figure import Figure

from rankone.report.curves import Curves
from rankone.report.figures.depth import depth_handles, draw_depth
from rankone.report.figures.profiles import (
    draw_by_depth,
    draw_profiles,
    panel_depths,
    profiled_depths,
)
from rankone.report.figures.style import legend_below, panel_rows, styled, training_handle
from rankone.report.records import NothingToShowError, Record, TableRecord, layers_label

END = 6.0
"""The profiles of the paper's Figure 3 end here."""


@styled
def fig3(records: Iterable[Record], table: Iterable[TableRecord] = ()) -> Figure:
    """Figure 3: for each set, loss against depth, the deepest models' profile, then all depths."""
    curves, cells = Curves(records), list(table)
    noises = [noise for noise in curves.sets() if profiled_depths(curves, noise)]
    if not noises:
        raise NothingToShowError(
            "figure 3 needs models trained on a set of noise levels, e.g. set_1_3"
        )
    depths = [panel_depths(curves, noise) for noise in noises]
    title = "Trained on " + " and ".join(noise.sentence for noise in noises)
    # A row for a single depth would repeat the panel above it.
    lower = [len(row) for row in depths if len(row) > 1]
    figure, panels = panel_rows([2 * len(noises), *lower], title=title)
    rows_below = iter(panels[1:])
    for index, noise in enumerate(noises):
        left, right = panels[0][2 * index : 2 * index + 2]
        deepest = max(depths[index])
        draw_depth(left, curves, cells, noise)
        left.set_xlabel("layers")
        left.set_ylabel("adjusted loss")
        draw_profiles(right, curves, noise, deepest, max(END, noise.largest + 1))
        right.set_title(f"{noise.sentence}, {layers_label(deepest)}")
        right.set_xlabel("noise standard deviation σ")
        if len(depths[index]) > 1:
            row = next(rows_below)
            draw_by_depth(row, curves, noise, depths[index], max(END, noise.largest + 1))
            row[0].set_ylabel("adjusted loss")
    for axes in panels[-1] if lower else []:
        axes.set_xlabel("noise standard deviation σ")
    legend_below(figure, [*depth_handles(cells), training_handle(noises)])
    return figure
