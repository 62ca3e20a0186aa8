"""`rankone train`: a task of the long range arena, with one mechanism or all of them alike."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rankone import provenance
from rankone.allocation import keep_memory
from rankone.devices import pick_device
from rankone.layers import MECHANISMS
from rankone.models import EncoderConfig
from rankone.progress import Narrator
from rankone.results import prepare_folder
from rankone.storage import write_json
from rankone.tasks.long_range import TASKS, Splits, check_folder, load
from rankone.tasks.long_range.published import published
from rankone.training.classify import Outcome, Training, read_outcome
from rankone.training.recipes import Recipe, recipe_for

Record = dict[str, Any]

OPTIONS: dict[str, dict[str, Any]] = {
    "performer": {"features": 128},
    "rfa": {"features": 64},
    "linformer": {"rank": 128, "share": "layerwise"},
    "nystromformer": {"landmarks": 128, "convolution": 35},
    "longformer": {"window": 64, "global_tokens": 1},
    "bigbird": {"block": 32},
    "long_short": {"rank": 32, "window": 64},
}
"""What mechanisms are given on these tasks; others have no options."""


def train(
    *,
    task: str,
    mechanism: str = "all",
    preset: str = "small",
    out: Path,
    data: str | None = None,
    folder: Path | None = None,
    steps: int | None = None,
    batch: int | None = None,
    rate: float | None = None,
    seed: int = 0,
    device: str = "auto",
    resume: bool = False,
    quiet: bool = False,
) -> Path:
    """Trains, and writes a folder for each mechanism and results.json; the path of that.

    All mechanisms have the same examples, the same recipe and the same batches in the same order.

    Args:
        task: one of listops, text, retrieval, image, pathfinder.
        mechanism: one of `rankone.layers.MECHANISMS`, or all.
        preset: small is a smaller task, laptop the arena's with few steps, arena wants a GPU.
        data: the source of the examples, if a task has several.
        folder: one with CIFAR-10's binary version, for images.
        steps, batch, rate: instead of those of the preset.
        resume: continue what the folder holds.

    Raises ValueError for what is not there.
    """
    if mechanism not in ("all", *MECHANISMS):
        raise ValueError(
            f"mechanism must be one of all, {', '.join(MECHANISMS)}, got {mechanism!r}"
        )
    recipe, where = (
        recipe_for(task, preset, steps=steps, batch=batch, rate=rate),
        pick_device(device),
    )
    check_folder(task, data, folder)
    names = tuple(MECHANISMS) if mechanism == "all" else (mechanism,)
    source = "cifar" if folder is not None else TASKS[task].source(data)[0]
    config = {"task": task, "data": source, "recipe": asdict(recipe), "seed": seed}
    prepare_folder(out, config, resume=resume, device=where.type)
    if where.type == "cpu":
        keep_memory()
    stamp = provenance.collect(where.type)
    with Narrator(quiet=quiet) as narrator:
        narrator.say(f"{task}: making {recipe.train + 2 * recipe.held} examples")
        sizes = (recipe.train, recipe.held, recipe.held)
        _, splits = load(task, sizes, data=data, folder=folder, small=recipe.small, seed=seed)
        outcomes = {}
        for name in names:
            home = out / name
            outcome = read_outcome(home)
            if outcome is None:
                model = encoder_for(task, name, recipe)
                outcome = Training(model, recipe, splits, where, seed).run(home, narrator, name)
            outcomes[name] = outcome
    for name in MECHANISMS:  # earlier calls with other mechanisms
        if name not in outcomes and (earlier := read_outcome(out / name)) is not None:
            outcomes[name] = earlier
    records = [
        _record(task, source, name, recipe, splits, outcomes[name])
        for name in MECHANISMS
        if name in outcomes
    ]
    seconds = round(sum(record["seconds"] for record in records), 1)  # earlier calls too
    path = out / "results.json"
    write_json(path, stamp | {"seconds": seconds, "records": records})
    if not quiet:
        show(records)
        Console().print(f"{seconds:.0f} s; {path}", highlight=False, markup=False, soft_wrap=True)
    return path


def encoder_for(task: str, mechanism: str, recipe: Recipe) -> EncoderConfig:
    """The model of a mechanism for a task."""
    facts = TASKS[task]
    return EncoderConfig(
        mechanism=mechanism,
        vocabulary=facts.vocabulary,
        classes=facts.classes,
        max_length=facts.small_length if recipe.small else facts.max_length,
        dim=recipe.dim,
        depth=recipe.depth,
        heads=recipe.heads,
        mlp=recipe.mlp,
        dropout=recipe.dropout,
        pooling=recipe.pooling,
        pair=facts.pair,
        options=OPTIONS.get(mechanism, {}),
    )


def _record(
    task: str, source: str, mechanism: str, recipe: Recipe, splits: Splits, outcome: Outcome
) -> Record:
    """One flat record; a published number stands in it only where the task is the same one."""
    sources = TASKS[task].sources
    arena = source == "cifar" or (sources[source].arena and not recipe.small)
    theirs = published(task, mechanism) if arena else None
    return {
        "task": task,
        "data": source,
        "mechanism": mechanism,
        "accuracy": round(outcome.accuracy, 4),
        "standard_error": round(outcome.standard_error, 4),
        "majority": round(splits.test.majority, 4),
        "first_token": round(splits.by_first_token, 4),
        "published": None if theirs is None else round(theirs.accuracy / 100, 4),
        "published_by": None if theirs is None else theirs.source,
        "small": recipe.small,
        "validation": round(outcome.validation, 4),
        "best_step": outcome.best_step,
        "steps": recipe.steps,
        "batch": recipe.batch,
        "rate": recipe.rate,
        "parameters": outcome.parameters,
        "seconds": outcome.seconds,
    }


def show(records: list[Record]) -> None:
    """Prints the table."""
    first = records[0]
    kind = "small, not the arena's" if first["small"] else "as in the arena"
    if first["data"] not in TASKS[first["task"]].sources:
        told = "CIFAR-10 in grey"
    else:
        told = TASKS[first["task"]].sources[first["data"]].told
    title = f"{first['task']}: {told} ({kind}); {first['steps']} steps of {first['batch']}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("mechanism")
    heads = (
        "accuracy %",
        "±",
        "majority %",
        "first token %",
        "published %",
        "parameters",
        "seconds",
    )
    for head in heads:
        table.add_column(head, justify="right")
    for r in records:
        theirs = "–" if r["published"] is None else f"{100 * r['published']:.1f}"
        table.add_row(
            r["mechanism"], f"{100 * r['accuracy']:.1f}", f"{100 * r['standard_error']:.1f}",
            f"{100 * r['majority']:.1f}", f"{100 * r['first_token']:.1f}", theirs,
            f"{r['parameters']:,}", f"{r['seconds']:.0f}",
        )  # fmt: skip
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=120, highlight=False)
    console.print(table)
