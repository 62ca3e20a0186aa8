"""Writes what a reproduction found: tables, figures, the report, and a result file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

from rankone.icl.ensemble import Run
from rankone.icl.model import LinearTransformer
from rankone.icl.presets import FIGURES
from rankone.icl.progress import Narrator
from rankone.report.figures import draw, save
from rankone.report.html import report_html
from rankone.report.records import NothingToShowError, TableRecord
from rankone.report.records import Record as ReportRecord
from rankone.report.tables import table1_csv, table1_latex, table1_markdown
from rankone.storage import write_json, write_text

WITH_TABLE = ("table1", "fig1", "all")
"""Targets that write the table too."""


def publish(
    out: Path,
    target: str,
    table: list[dict[str, Any]],
    records: list[dict[str, Any]],
    models: dict[Run, LinearTransformer],
    config: dict[str, Any],
    stamp: dict[str, Any],
    narrator: Narrator,
) -> Path:
    """Writes everything into `out`; the path of report.html."""
    cells = cast("list[TableRecord]", table)
    notes = make_notes(table, stamp)
    if target in WITH_TABLE:
        write_result(out / "table1.json", table, stamp)
        write_text(out / "table1.csv", table1_csv(cells))
        write_text(out / "table1.md", table1_markdown(cells))
        write_text(out / "table1.tex", table1_latex(cells))
    pictures = {}
    names = {"all": FIGURES, "table1": ("fig1",)}.get(target, (target,))
    with narrator.stage("figures", len(names)) as advance:
        for name in names:
            try:
                title, matrices = _weights(table, models)
                figure = draw(
                    name,
                    cast("list[ReportRecord]", records),
                    table=cells,
                    matrices=matrices,
                    matrices_title=title,
                )
                pictures[name] = save(figure, out / "figures", name)
            except NothingToShowError as nothing:
                notes.append(f"{name} is not drawn: {nothing}")
            advance()
    for name in FIGURES:  # of earlier targets
        file = out / "figures" / f"{name}.png"
        if name not in names and file.exists():
            pictures[name] = file.read_bytes()
    pictures = {name: pictures[name] for name in FIGURES if name in pictures}
    page = out / "report.html"
    title = f"Linear transformers in context: {target}, {config['preset']['name']} preset"
    write_text(page, report_html(title, cells, pictures, {**config, **_brief(stamp)}, notes))
    return page


def write_result(path: Path, table: list[dict[str, Any]], stamp: dict[str, Any]) -> None:
    """A result file: what was run, where and when, and a flat record a measurement."""
    keys = ("command", "device", "versions", "date", "commit", "seconds", "stages")
    write_json(path, {**{key: stamp.get(key) for key in keys}, "records": table})


def _brief(stamp: dict[str, Any]) -> dict[str, Any]:
    left_out = ("restarts", "messages", "seconds")  # the time is not over yet
    return {key: value for key, value in stamp.items() if key not in left_out}


def _weights(
    table: list[dict[str, Any]], models: dict[Run, LinearTransformer]
) -> tuple[str | None, Any]:
    """Matrices for figure 4: the FULL model of 4 layers on {1, 3}, or the nearest depth to it."""
    runs = [run for run in models if run.kind == "full" and run.noise == "set_1_3"]
    if not runs:
        return None, None
    depth = min({run.layers for run in runs}, key=lambda layers: (abs(layers - 4), layers))
    seeds = {
        row["seed"]
        for row in table
        if (row["model"], row["layers"], row["noise"]) == ("full", depth, "set_1_3")
    }
    run = next(run for run in runs if run.layers == depth and run.seed in (seeds or {run.seed}))
    P, Q = (matrix.detach().cpu().numpy() for matrix in models[run].matrices())
    return f"FULL, {depth} layers, σ ∈ {{1, 3}}", (P, Q)


def make_notes(table: list[dict[str, Any]], stamp: dict[str, Any]) -> list[str]:
    """Sentences that a reader of the numbers has to know."""
    trained = [row for row in table if row["layers"] is not None and row["within"] is not None]
    held = sum(row["within"] for row in trained)
    notes = [
        f"{held} of {len(trained)} trained cells are at most the value they are held to: the "
        "published one plus two standard errors of the published table; for GD++ cells below "
        "what GD++ can reach in population, that population value; for noise-free cells of five "
        "layers and more, 1e-6."
    ]
    for row in trained:
        if not row["within"]:
            loss = row["adjusted_loss"]
            shown = "not finite" if loss is None else f"{loss:.4g}"
            notes.append(
                f"{row['model']} with {row['layers']} layers on {row['noise']} is {shown}, above "
                f"its limit {row['limit']:.4g}."
            )
    lost = sum(1 for row in trained if row["adjusted_loss"] is None)
    restarts = sum(row["restarts"] or 0 for row in trained)
    notes.append(
        f"Rows that diverged were restarted {restarts} times in {len(trained)} cells; "
        f"{lost} cells have no finite loss."
    )
    floor = [row for row in trained if row["floor"] and row["adjusted_loss"] is not None]
    if floor:
        best = min(row["adjusted_loss"] / row["floor"] for row in floor)
        notes.append(f"The closest cell is {best:.3g} times the Bayes floor.")
    if math.isfinite(stamp.get("training_seconds", math.nan)):
        notes.append(f"Training took {stamp['training_seconds']:.0f} s on {stamp['device']}.")
    return notes
