"""The operations beside their peers, in one process: `rankone bench ops`.

Every implementation is compared with the definition in float64 at a small length before anything is
timed, and in full shape before that shape is. The file is written after every shape, so that a run
that is stopped loses little and can be resumed. If an implementation of ours is wrong, the run ends
and what it has written is taken back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from rankone import provenance
from rankone.bench import peers
from rankone.bench.cases import CPU, GPU, OPS, QUICK_CPU, QUICK_GPU, Plan
from rankone.bench.measure import Measurement
from rankone.bench.parity import ParityError
from rankone.bench.results import ResultFile
from rankone.bench.summary import show
from rankone.devices import pick_device
from rankone.progress import Narrator
from rankone.storage import read_json, write_bytes


def bench(
    *,
    out: Path | None = None,
    device: str = "auto",
    quick: bool = False,
    op: str = "all",
    minutes: float | None = None,
    resume: bool = False,
    redraw: Path | None = None,
    plan: Plan | None = None,
) -> Path:
    """Measures, prints tables, writes records and a plot; the path of the records.

    Args:
        out: benchmarks/results/ops-cpu.json (ops-gpu.json on a GPU) inside the project's checkout
            and the working directory elsewhere by default; a quick look goes to runs/. The plot is
            beside it, with the ending png.
        op: one operation, or all.
        minutes: no further shape is begun after this time; what is left out is told.
        resume: keep what the file holds and measure the rest.
        redraw: measure nothing, print and draw what this file holds.
        plan: what is measured, instead of the plan for the device.

    Raises ParityError if an implementation of ours is wrong, ValueError for a device that is not
    there and for a file that cannot be resumed.
    """
    if redraw is not None:
        found = read_json(redraw)
        if not isinstance(found, dict) or not found.get("records"):
            raise ValueError(f"{redraw} is no result of rankone bench ops")
        return _publish(redraw, found)
    if op not in ("all", *OPS):
        raise ValueError(f"op must be one of all, {', '.join(OPS)}, got {op!r}")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes must be positive, got {minutes}")
    where = pick_device(device)
    gpu = where.type == "cuda"
    usual = (QUICK_GPU if gpu else QUICK_CPU) if quick else (GPU if gpu else CPU)
    stamp = provenance.collect(where.type)
    stamp["versions"] |= peers.versions()
    path = _default_path(gpu, quick) if out is None else out
    file = ResultFile(path, stamp, resume=resume)
    with Narrator() as narrator, peers.flash_attention(where):
        run = Measurement(plan or usual, where, file.findings, narrator, minutes)
        try:
            run.everything(OPS if op == "all" else (op,), file.write)
        except ParityError:
            file.take_back()
            raise
    return _publish(path, read_json(path))


def _default_path(gpu: bool, quick: bool) -> Path:
    name = "ops-gpu" if gpu else "ops-cpu"
    if quick:
        return Path("runs") / f"{name}-quick.json"
    checkout = Path("benchmarks").is_dir() and Path("src/rankone").is_dir()
    return (Path("benchmarks/results") if checkout else Path()) / f"{name}.json"


def _publish(path: Path, result: dict[str, Any]) -> Path:
    """Prints the tables and draws the plot, where matplotlib is installed."""
    show(result)
    console = Console(highlight=False, soft_wrap=True)
    picture = path.with_suffix(".png")
    drawn = f"{path} and {picture.name}"
    if not result["records"]:
        drawn = f"{path}; nothing was timed, so there is no plot"
    elif provenance.installed_version("matplotlib") is None:
        drawn = f"{path}; no plot without matplotlib, later: rankone bench ops --redraw {path}"
    else:
        from rankone.bench.plots import plot

        write_bytes(picture, plot(result))
    console.print(f"{result['seconds']:.0f} s; {drawn}")
    return path
