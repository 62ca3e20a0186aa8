"""The paper's Figures 1 to 7, drawn from evaluation records.

    figure = draw("fig1", records, table=table)
    save(figure, out_dir, "fig1")               # fig1.png and fig1.pdf

Every figure adapts to the records at hand: panels for the noises and depths that are there.
One that finds nothing of its subject raises `NothingToShowError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from rankone.report.figures.categorical import fig3
from rankone.report.figures.depth import fig1
from rankone.report.figures.files import render, save
from rankone.report.figures.intermediate import fig5, fig7
from rankone.report.figures.profiles import fig2, fig6
from rankone.report.figures.weights import fig4
from rankone.report.records import NothingToShowError, Record, TableRecord

FIGURES: dict[str, Callable[..., Figure]] = {
    "fig1": fig1,
    "fig2": fig2,
    "fig3": fig3,
    "fig4": fig4,
    "fig5": fig5,
    "fig6": fig6,
    "fig7": fig7,
}
"""Name → function; `draw` calls any of them with the arguments that it takes."""

_WITH_TABLE = ("fig1", "fig3")


def draw(
    name: str,
    records: Iterable[Record],
    *,
    table: Iterable[TableRecord] = (),
    matrices: tuple[ArrayLike, ArrayLike] | None = None,
    matrices_title: str | None = None,
) -> Figure:
    """Draws a figure by name.

    `table` gives Figures 1 and 3 the published values; `matrices` are the (P, Q) of the model
    that Figure 4 shows, named by `matrices_title`. Raises ValueError for an unknown name,
    `NothingToShowError` where what the figure needs is missing.
    """
    if name not in FIGURES:
        raise ValueError(f"figure must be one of {', '.join(FIGURES)}, got {name!r}")
    if name == "fig4":
        if matrices is None:
            raise NothingToShowError("figure 4 needs the matrices P and Q of a trained FULL model")
        return fig4(*matrices, **({"title": matrices_title} if matrices_title else {}))
    return FIGURES[name](records, table) if name in _WITH_TABLE else FIGURES[name](records)


__all__ = [
    "FIGURES",
    "NothingToShowError",
    "draw",
    "fig1",
    "fig2",
    "fig3",
    "fig4",
    "fig5",
    "fig6",
    "fig7",
    "render",
    "save",
]
