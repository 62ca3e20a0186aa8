"""`rankone icl experiment`: a recipe from its name to its records and its figure."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rankone import provenance
from rankone.icl.chosen import chosen_models
from rankone.icl.experiments.minima import find_minima
from rankone.icl.experiments.real_data import real_data
from rankone.icl.experiments.transfer import transfer
from rankone.report.figures import experiments as figures
from rankone.storage import write_bytes, write_json
from rankone.tasks.noise import noise_from_name

NAMES = ("minima", "transfer", "real_data")
_NOISES = ("sigma_0", "set_1_3", "sigma_5")


def experiment(
    name: str, *, run: Path, out: Path | None = None, noise: str = "sigma_5", quiet: bool = False
) -> Path:
    """Does one experiment; writes NAME.json and NAME.png into `out`, whose path it returns.

    Args:
        name: minima (trains nothing that the run has to hold), transfer or real_data.
        run: a folder of `rankone icl reproduce`, whose models are used.
        out: RUN/experiments by default.
        noise: what the models were trained on.
    """
    if name not in NAMES:
        raise ValueError(f"experiment must be one of {', '.join(NAMES)}, got {name!r}")
    out, began = out or run / "experiments", time.monotonic()
    stamp = provenance.collect("cpu")
    if name == "minima":
        records = [
            {"noise": other} | record
            for other in _NOISES
            for record in find_minima(variance=noise_from_name(other).mean_square)
        ]
        picture = figures.fig_minima(records)
    else:
        found = chosen_models(run)
        if name == "transfer":
            records = transfer(found, noise=noise)
            picture = figures.fig_transfer(records, noise)
        else:
            records = real_data(found, noise=noise)
            picture = figures.fig_real_data(records, noise)
    seconds = round(time.monotonic() - began, 1)
    write_json(out / f"{name}.json", stamp | {"seconds": seconds, "records": records})
    write_bytes(out / f"{name}.png", picture)
    if not quiet:
        show(name, records)
        told = f"{out / name}.json and {name}.png"
        Console().print(told, highlight=False, markup=False, soft_wrap=True)
    return out


def show(name: str, records: list[dict[str, Any]]) -> None:
    """The records as a table."""
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=140, highlight=False)
    heads = [head for head in records[0] if head not in ("prompts", "context")]
    table = Table(title=name, title_justify="left", box=box.SIMPLE_HEAD)
    for head in heads:
        table.add_column(head.replace("_", " "))
    for record in records:
        table.add_row(*(_cell(record[head]) for head in heads))
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "not finite"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
