"""The training step of the laboratory beside the plain PyTorch step, in one run.

Loss and gradient of an ensemble, by the three implementations of `rankone.icl.contest`: for every
kind and depth, with prompts at hand and with prompts drawn anew for each step, then for longer and
longer prompts. Before anything is timed the implementations are held to each other, and a
disagreement ends the run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from rankone import provenance
from rankone.devices import pick_device
from rankone.icl.contest import DIM, NOISES, Contest
from rankone.icl.ensemble import Ensemble
from rankone.icl.gradients import choose
from rankone.icl.model import KINDS, Kind
from rankone.progress import Narrator
from rankone.provenance import TOLERATED_CORES, busy_seconds
from rankone.storage import write_bytes, write_json

Record = dict[str, Any]

TOKEN_MEMORY = 2 * 2**30
"""The token step is not run where it would need more bytes than this."""


@dataclass(frozen=True)
class Plan:
    """What is measured. The ensemble has a member for each of two noises and each seed."""

    layers: tuple[int, ...]
    kinds: tuple[Kind, ...] = KINDS
    seeds: int = 2
    batch: int = 1024
    context: int = 20
    contexts: tuple[int, ...] = (20, 200, 2000, 20_000)
    """Context lengths of the second part, at which the step is timed with drawing."""
    contexts_layers: int = 3
    contexts_batch: int = 256
    rounds: tuple[int, int] = (5, 30)
    """Fewest and most repeats; between them the time decides."""
    seconds: float = 2.0
    """Time for the repeats of one kind and depth."""

    @property
    def members(self) -> int:
        """Models in the ensemble."""
        return self.seeds * len(NOISES)


QUICK = Plan(
    layers=(1, 3),
    kinds=("full",),
    batch=256,
    contexts=(20, 2000),
    contexts_layers=2,
    contexts_batch=64,
    rounds=(3, 3),
)
"""A look, not a measurement; most of it is the time to compile the kernels."""


def bench(*, out: Path | None = None, device: str = "auto", quick: bool = False) -> Path:
    """Times the training step, prints tables, writes records and a plot; the path of the records.

    `out` defaults to benchmarks/results/icl-cpu.json (icl-gpu.json on a GPU) inside the project's
    checkout and to the working directory elsewhere; a quick look goes to runs/. The plot is
    beside it, with the ending png.

    Raises ParityError if the implementations disagree, ValueError for a device that is not there,
    BackendUnavailableError where the fused kernels cannot run.
    """
    where = pick_device(device)
    gpu = where.type == "cuda"
    plan = QUICK if quick else Plan(layers=tuple(range(1, 8 if gpu else 6)))
    path = _default_path(gpu, quick) if out is None else out
    started, before = time.monotonic(), busy_seconds()
    with Narrator() as narrator:
        records = measure(plan, where, narrator)
    stamp = provenance.collect(where.type)
    seconds = time.monotonic() - started
    after = busy_seconds()
    stamp["other_cores"] = (
        None if before is None or after is None else round(max(0.0, after - before) / seconds, 2)
    )
    write_json(path, {**stamp, "seconds": round(seconds, 1), "records": records})
    picture = path.with_suffix(".png")
    write_bytes(picture, plot(records, stamp["device"]))
    _show(records, stamp["device"], plan)
    console = Console(highlight=False, soft_wrap=True)
    if (stamp["other_cores"] or 0) > TOLERATED_CORES:
        console.print(
            f"Do not trust these times: other programs kept {stamp['other_cores']} cores busy."
        )
    console.print(f"{seconds:.0f} s; {path} and {picture.name}")
    return path


def _default_path(gpu: bool, quick: bool) -> Path:
    name = "icl-gpu" if gpu else "icl-cpu"
    if quick:
        return Path("runs") / f"{name}-quick.json"
    checkout = Path("benchmarks").is_dir() and Path("src/rankone").is_dir()
    return (Path("benchmarks/results") if checkout else Path()) / f"{name}.json"


def measure(plan: Plan, device: torch.device, narrator: Narrator) -> list[Record]:
    """All records: parity first, then the step at every kind and depth, then long contexts."""
    fused, _ = choose("fused_gpu" if device.type == "cuda" else "fused_cpu", device, DIM)
    cases = [
        Contest(kind, layers, plan.context, plan.batch, plan.seeds, device, fused)
        for kind in plan.kinds
        for layers in plan.layers
    ]
    runs = [run for case in cases for run in case.runs]
    Ensemble(runs, dict(NOISES), dim=DIM, device=device, impl=fused).compile()  # all side by side
    records: list[Record] = []
    with narrator.stage("parity", len(cases)) as advance:
        for case in cases:
            records += case.parity()
            advance()
    with narrator.stage("timing", len(cases)) as advance:
        for case in cases:
            steps = {(impl, drawing, case): step for (impl, drawing), step in case.steps().items()}
            records += _time(steps, plan, "step")
            advance()
    with narrator.stage("longer prompts", 2) as advance:
        for steps in _longer_prompts(plan, device, fused):
            records += _time(steps, plan, "context")
            advance()
    return records


Steps = dict[tuple[str, bool, Contest], Callable[[], object]]
"""What takes turns: (implementation, whether it draws the prompts, models) → a step."""


def _time(steps: Steps, plan: Plan, name: str) -> list[Record]:
    """Medians of repeats in turn, so that a busy machine slows all of them alike."""
    for (_, _, case), step in steps.items():
        _milliseconds(step, case.device)  # compiles, allocates, is not counted
    times: dict[tuple[str, bool, Contest], list[float]] = {key: [] for key in steps}
    fewest, most = plan.rounds
    began = time.monotonic()
    for done in range(most):
        if done >= fewest and time.monotonic() - began > plan.seconds:
            break
        for key, step in steps.items():
            times[key].append(_milliseconds(step, key[-1].device))
    records = []
    for (impl, drawing, case), found in times.items():
        median = statistics.median(found)
        plain = times.get(("token", drawing, case))
        ratio = None if plain is None else round(statistics.median(plain) / median, 3)
        records.append(
            {
                "measure": name,
                "impl": case.fused if impl == "fused" else impl,
                "kind": case.kind,
                "layers": case.layers,
                "members": case.members,
                "batch": case.batch,
                "context": case.context,
                "drawing": drawing,
                "dtype": "float32",
                "ms": round(median, 4),
                "fastest_ms": round(min(found), 4),
                "repeats": len(found),
                "times_token": ratio,
            }
        )
    return records


def _milliseconds(step: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * (time.perf_counter() - start)


def _longer_prompts(plan: Plan, device: torch.device, fused: str) -> list[Steps]:
    """The step of full models at every context, drawing included: fused, then token.

    Not side by side: a token step on long prompts leaves nothing of the others in the caches.
    The token step is left out where it does not fit into memory.
    """
    layers, batch = plan.contexts_layers, plan.contexts_batch
    gram_steps: Steps = {}
    token_steps: Steps = {}
    for context in plan.contexts:
        case = Contest("full", layers, context, batch, plan.seeds, device, fused)
        gram_steps["fused", True, case] = case.drawing_fused_step
        tokens = 4 * case.members * batch * (context + 1) * (DIM + 1)
        # Two sets of tokens a layer wait for autograd.
        if tokens * (2 * layers + 3) <= TOKEN_MEMORY:
            token_steps["token", True, case] = case.drawing_token_step
    return [gram_steps, token_steps]


def _show(records: list[Record], device: str, plan: Plan) -> None:
    """Prints the two tables."""
    console = Console()
    console = console if console.is_terminal else Console(width=120)
    console.print(
        f"{device}: ms a training step (loss and gradient) of {plan.members} models, "
        f"{plan.batch} prompts of {plan.context} examples each; ratio: token over fused",
        highlight=False,
    )
    console.print(_steps_table([record for record in records if record["measure"] == "step"]))
    console.print(
        f"Longer prompts: ms a step, drawing included, of {plan.members} FULL models of "
        f"{plan.contexts_layers} layers, {plan.contexts_batch} prompts each",
        highlight=False,
    )
    longer = Table(box=box.SIMPLE_HEAD)
    for name in ("examples", "token", "fused"):
        longer.add_column(name, justify="right")
    for context, found in _by_context(records).items():
        times = (found.get(impl) for impl in ("token", "fused"))
        cells = ("too large" if ms is None else f"{ms:.2f}" for ms in times)
        longer.add_row(f"{context:,}", *cells)
    console.print(longer)


def _steps_table(steps: list[Record]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    head = ("token", "gram", "fused", "ratio")
    for name in ("kind", "layers", *head, *(f"{name}\n+ drawing" for name in head)):
        table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    cases = list(dict.fromkeys((record["kind"], record["layers"]) for record in steps))
    for kind, layers in cases:
        row = [r for r in steps if (r["kind"], r["layers"]) == (kind, layers)]
        cells = []
        for part in (row[:3], row[3:]):  # in the order of `Contest.steps`
            cells += [f"{record['ms']:.2f}" for record in part]
            cells.append(f"{part[-1]['times_token']:.1f}")
        last = (kind, layers) == [case for case in cases if case[0] == kind][-1]
        table.add_row(kind, str(layers), *cells, end_section=last)
    return table


def _by_context(records: list[Record]) -> dict[int, dict[str, float]]:
    """Examples of a prompt → implementation (`token` or `fused`) → ms."""
    found: dict[int, dict[str, float]] = {}
    for record in records:
        if record["measure"] == "context":
            impl = "token" if record["impl"] == "token" else "fused"
            found.setdefault(record["context"], {})[impl] = record["ms"]
    return found


def plot(records: list[Record], device: str) -> bytes:
    """Time a step against the examples of a prompt, both axes logarithmic; a PNG."""
    from matplotlib.figure import Figure

    from rankone.report.figures.files import render
    from rankone.report.figures.style import COLORS, styled

    times = _by_context(records)
    looks = {
        "token": ("plain PyTorch on tokens", COLORS["gd++"], "o"),
        "fused": ("rankone, on Gram matrices", COLORS["full"], "^"),
    }

    @styled
    def draw() -> bytes:
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        axes = figure.add_subplot()
        for impl, (label, color, marker) in looks.items():
            points = [(n, found[impl]) for n, found in times.items() if impl in found]
            axes.plot(*zip(*points, strict=True), label=label, color=color, marker=marker)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(bottom=axes.get_ylim()[0] / 2)
        axes.grid(color="#E3E3E3", linewidth=0.5)
        axes.set_xlabel("examples of a prompt, n")
        axes.set_ylabel("ms a training step, drawing included")
        axes.set_title(f"FULL models\n{device}")
        axes.legend(loc="upper left")
        return render(figure)

    picture: bytes = draw()
    return picture
