"""Heat maps of trained weights (Figure 4)."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from rankone.report.figures.style import styled


@styled
def fig4(P: ArrayLike, Q: ArrayLike, title: str = "FULL model, σ ∈ {1, 3}") -> Figure:
    """Figure 4: the matrices Q (top) and P (bottom) of every layer, `[L, H, D, D]` each.

    Several heads lie under each other. Each matrix has its own scale around zero: (P, Q) and
    (cP, Q/c) are the same layer, so sizes are not to be compared. Thin lines part the last
    coordinate, which holds y. Raises ValueError for other shapes.
    """
    stacks = {"Q": np.asarray(Q, dtype=np.float64), "P": np.asarray(P, dtype=np.float64)}
    for name, stack in stacks.items():
        if stack.ndim != 4 or stack.shape[2] != stack.shape[3] or stack.shape != stacks["Q"].shape:
            raise ValueError(f"P and Q must both have shape [L, H, D, D], got {name} {stack.shape}")
    layers, heads = stacks["Q"].shape[:2]
    size = (max(1.75 * layers, 4.0), 1.65 * 2 * heads + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(2 * heads, layers, squeeze=False)
    for row, (name, head) in enumerate((name, head) for name in stacks for head in range(heads)):
        for layer in range(layers):
            axes = panels[row][layer]
            _heat_map(figure, axes, stacks[name][layer, head])
            which = f"{layer}, {head}" if heads > 1 else f"{layer}"
            axes.set_title(f"${name}^{{{which}}}$")
    return figure


def _heat_map(figure: Figure, axes: Axes, matrix: NDArray[np.float64]) -> None:
    reach = float(np.abs(matrix).max()) or 1.0
    image = axes.imshow(matrix, cmap="RdBu_r", vmin=-reach, vmax=reach, interpolation="nearest")
    border = matrix.shape[0] - 1.5
    axes.axhline(border, color="black", linewidth=0.6)
    axes.axvline(border, color="black", linewidth=0.6)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(True)
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03, ticks=[-reach, 0, reach])
    bar.ax.set_yticklabels([f"{-reach:.2g}", "0", f"{reach:.2g}"], fontsize=6.5)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, pad=2)
