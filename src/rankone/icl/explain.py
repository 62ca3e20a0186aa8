"""`rankone icl explain`: the layers of trained models, as tables and a figure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from rankone import provenance
from rankone.icl.chosen import Chosen, chosen_models
from rankone.icl.model import KINDS
from rankone.icl.probes import Layer, probe
from rankone.storage import write_bytes, write_json
from rankone.tasks.noise import Fixed
from rankone.tasks.regression import NoisyRegression

Record = dict[str, Any]
PROMPTS = 4096


def explain(
    run: Path,
    *,
    kind: str = "all",
    layers: int | None = None,
    noise: str = "sigma_5",
    sigma: Sequence[float] = (0.0, 1.0, 3.0, 5.0),
    seed: int = 0,
    quiet: bool = False,
) -> Path:
    """Probes models of a run on prompts of some noise levels; writes RUN/explain/, its path.

    explain.json holds a flat record for every model, noise level and layer, explain.png the picture
    of them; the tables are printed.

    Args:
        kind: full, diag, gd++ or all.
        layers: depth; the deepest that there is unless given.
        noise: name of the noise the models were trained on.
        sigma: standard deviations of the labels' noise in the prompts.
    """
    from rankone.report.figures.probes import fig_probes

    if kind not in ("all", *KINDS):
        raise ValueError(f"kind must be one of all, {', '.join(KINDS)}, got {kind!r}")
    if not sigma or any(not 0 <= s < float("inf") for s in sigma):
        raise ValueError(f"sigma must be standard deviations, at least 0, got {list(sigma)}")
    began, stamp = time.monotonic(), provenance.collect("cpu")
    found = chosen_models(run)
    picked = _picked(found, kind, layers, noise)
    records = [
        record
        for one, model in picked.items()
        for s in sigma
        for record in _records(found, one, model, s, seed)
    ]
    out = run / "explain"
    seconds = round(time.monotonic() - began, 1)
    write_json(out / "explain.json", stamp | {"seconds": seconds, "records": records})
    write_bytes(out / "explain.png", fig_probes(records))
    if not quiet:
        show(records)
        Console().print(f"{out / 'explain.json'} and explain.png", highlight=False, markup=False)
    return out


def _picked(found: Chosen, kind: str, layers: int | None, noise: str) -> dict[Any, Any]:
    """One model of each kind."""
    noises = sorted({run.noise for run in found.models})
    if noise not in noises:
        raise ValueError(f"noise must be one that was trained on, {', '.join(noises)}; got {noise}")
    mine = {
        run: model
        for run, model in found.models.items()
        if run.noise == noise and kind in ("all", run.kind)
    }
    depths = sorted({run.layers for run in mine})
    depth = max(depths, default=0) if layers is None else layers
    if depth not in depths:
        raise ValueError(
            f"layers must be a depth that was trained for {kind} on {noise}, "
            f"{', '.join(map(str, depths)) or 'none'}; got {depth}"
        )
    return {run: model for run, model in mine.items() if run.layers == depth}


def _records(found: Chosen, run: Any, model: Any, sigma: float, seed: int) -> list[Record]:
    task = NoisyRegression(dim=found.dim, context=found.context, noise=Fixed(sigma))
    prompts = task.sample_gram(PROMPTS, generator=seed, dtype=torch.float64)
    facts = {"model": run.kind, "layers": run.layers, "noise": run.noise, "seed": run.seed}
    return [
        facts | {"sigma": sigma, "prompts": PROMPTS} | layer._asdict()
        for layer in probe(model, prompts, context=found.context)
    ]


HEADS = {
    "layer": "layer",
    "adjusted_loss": "adjusted loss",
    "step": "step × n",
    "alignment": "along g",
    "precondition_low": "M, least",
    "precondition_high": "M, largest",
    "momentum": "|u| √n",
    "rescaling": "1 + d",
    "label": "a",
    "ridge_variance": "acts as if σ² =",
    "ridge_distance": "off ridge by",
}
"""Columns of the tables, and what stands above them."""

assert set(HEADS) == set(Layer._fields)


def show(records: list[Record]) -> None:
    """A table for each model and noise level."""
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=150, highlight=False)
    for key in dict.fromkeys((r["model"], r["layers"], r["noise"], r["sigma"]) for r in records):
        kind, layers, noise, sigma = key
        title = f"{kind}, {layers} layers, trained on {noise}; prompts with σ² = {sigma**2:g}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for head in HEADS.values():
            table.add_column(head, justify="right")
        for r in records:
            if (r["model"], r["layers"], r["noise"], r["sigma"]) == key:
                table.add_row(*(_cell(r[name]) for name in HEADS))
        console.print(table)


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return str(value) if isinstance(value, int) else f"{value:.3g}"
