"""Reproduces Table 1 and figures 1 to 7 of Vladymyrov et al. 2024, from nothing to a report."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import torch

from rankone import provenance
from rankone.devices import pick_device
from rankone.icl.cells import make_table
from rankone.icl.ensemble import Run
from rankone.icl.fitting import fit
from rankone.icl.folder import (
    Diary,
    checkpoint_folder,
    model_path,
    read_diary,
    read_evaluation,
    read_models,
    remove_checkpoints,
    write_diary,
    write_evaluation,
)
from rankone.icl.model import Kind, LinearTransformer
from rankone.icl.presets import FIGURES, KINDS, PRESETS, TARGETS, Preset
from rankone.icl.progress import Narrator
from rankone.icl.scoring import evaluate
from rankone.icl.training import Recipe
from rankone.results import prepare_folder
from rankone.tasks.noise import noise_from_name

LARGEST_SEED = 100_000


def runs_for(target: str, preset: Preset, seed: int) -> list[Run]:
    """The models that a target needs. Different seeds have no model in common."""

    def grid(
        noises: tuple[str, ...], layers: tuple[int, ...], kinds: tuple[Kind, ...]
    ) -> list[Run]:
        seeds = range(seed * preset.seeds, (seed + 1) * preset.seeds)
        return [
            Run(k, n, noise, s) for k in kinds for n in layers for noise in noises for s in seeds
        ]

    uniform = tuple(noise for noise in preset.noises if noise.startswith("sigma"))
    chosen = tuple(noise for noise in preset.noises if noise.startswith("set"))
    five = ("sigma_5",)
    depths = preset.layers
    extra = grid(five, preset.extra_layers, KINDS)
    if target == "fig2":
        return sorted({*grid(uniform, depths[-1:], KINDS), *grid(five, depths, KINDS)})
    if target == "fig4":
        return grid(("set_1_3",), (min(4, depths[-1]),), ("full",))
    return {
        "table1": grid(preset.noises, depths, KINDS),
        "fig1": grid(uniform, depths, KINDS),
        "fig3": grid(chosen, depths, KINDS),
        "fig5": grid(five, depths, KINDS) + extra,
        "fig6": grid(five, depths, KINDS),
        "fig7": grid(five, depths, KINDS) + extra,
        "all": grid(preset.noises, depths, KINDS) + extra,
    }[target]


def reproduce(
    *,
    target: str = "all",
    preset: str = "laptop",
    out: Path,
    device: str = "auto",
    resume: bool = False,
    seed: int = 0,
    quiet: bool = False,
) -> Path:
    """Trains, evaluates, and writes tables, figures and report.html into `out`; its path.

    A folder holds one configuration: another one is refused and left as it is. With `resume` an
    interrupted reproduction goes on, models that are there are used again, and what was measured
    for other targets stays in the results.
    """
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {target!r}")
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed must be from 0 to {LARGEST_SEED}, got {seed}")
    size = PRESETS[preset]
    where = pick_device(device)
    recipe = Recipe(**size.recipe)
    config = {"preset": asdict(size), "recipe": asdict(recipe), "seed": seed}
    prepare_folder(out, config, resume=resume, device=where.type)
    earlier = read_evaluation(out)
    started = time.monotonic()
    narrator = Narrator(quiet=quiet)
    with narrator:
        runs = runs_for(target, size, seed)
        models, diary = train_missing(runs, size, recipe, out, target, where, narrator)
        measured = evaluate(models, size, seed, where, narrator, target)
        evaluation = earlier.merged(measured)
        write_evaluation(out, evaluation)
        spent = {"seconds": round(time.monotonic() - started, 1), **diary._asdict()}
        stamp = {**provenance.collect(where.type), **spent}
        table = make_table(evaluation.records, diary.restarts, size)
        from rankone.icl.publish import WITH_TABLE, publish, write_result

        page = publish(out, target, table, evaluation.records, models, config, stamp, narrator)
    seconds = time.monotonic() - started
    if target in WITH_TABLE:  # the whole time is known only now
        stamp["seconds"] = round(seconds, 1)
        stamp["stages"] = {"training": diary.training_seconds, **narrator.seconds}
        write_result(out / "table1.json", table, stamp)
    narrator.finish(table, page, target, seconds)
    return page


def train_missing(
    runs: list[Run],
    preset: Preset,
    recipe: Recipe,
    out: Path,
    target: str,
    device: torch.device,
    narrator: Narrator,
) -> tuple[dict[Run, LinearTransformer], Diary]:
    """Loads the models that are there and trains the others together."""
    diary = read_diary(out)
    models = read_models(out, runs, diary, preset.dim)
    missing = [run for run in runs if run not in models]
    if missing:
        noises = {run.noise: noise_from_name(run.noise) for run in missing}
        fitted = fit(
            missing,
            noises,
            recipe,
            dim=preset.dim,
            context=preset.context,
            device=device,
            checkpoints=checkpoint_folder(out, target, missing),
            progress=narrator.training(len(missing), recipe),
        )
        for run, model in fitted.models.items():
            model.save(model_path(out, run))
        counts = {run.name: count for run, count in fitted.restarts.items()}
        diary = Diary(
            diary.restarts | counts,
            diary.messages + fitted.messages,
            round(diary.training_seconds + fitted.seconds, 1),
        )
        write_diary(out, diary)
        models |= fitted.models
        remove_checkpoints(out, target)
    return {run: models[run] for run in runs}, diary


__all__ = ["FIGURES", "reproduce", "runs_for", "train_missing"]
