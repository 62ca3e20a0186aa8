"""Scores all models of a reproduction: on draws of prompts, in expectation, and by noise level."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from rankone.icl.ensemble import Run
from rankone.icl.evaluation import (
    Record,
    Tuning,
    adjusted_or_infinity,
    expected_problem,
    make_problems,
    profile,
    score_baselines,
    score_models,
    tune,
    typical,
)
from rankone.icl.folder import Evaluation
from rankone.icl.model import LinearTransformer
from rankone.icl.presets import Preset
from rankone.icl.progress import Narrator
from rankone.tasks.noise import Noise, noise_from_name

EXPECTATION, PROFILES = 10**5, 2 * 10**5
"""Distances of the seeds of these prompts from those of the draws."""


def evaluate(
    models: dict[Run, LinearTransformer],
    preset: Preset,
    seed: int,
    device: torch.device,
    narrator: Narrator,
    target: str,
) -> Evaluation:
    """Scores every model and baseline on its own noise, then the profiles that figures need."""
    names = sorted({run.noise for run in models}, key=preset.noises.index)
    noises = {name: noise_from_name(name) for name in names}
    by_noise = {
        name: {run: model for run, model in models.items() if run.noise == name} for name in names
    }
    sizes: dict[str, Any] = {
        "dim": preset.dim,
        "context": preset.context,
        "device": device,
        "seed": 10**6 * (1 + seed),
    }
    drawn: list[list[Record]] = []
    tunings: dict[str, Tuning] = {}
    with narrator.stage("evaluation", preset.draws * len(names)) as advance:
        for draw in range(preset.draws):
            drawn.append([])
            seeded = sizes | {"seed": sizes["seed"] + draw, "sequences": preset.sequences}
            for problem in make_problems(noises, **seeded):
                if draw == 0:
                    tunings[problem.name] = tune(problem)
                drawn[-1] += score_baselines(problem, tunings[problem.name], problem.noise)
                drawn[-1] += score_models(problem, by_noise[problem.name])
                advance()
    records = typical(drawn)
    with narrator.stage("expectation", len(names)) as advance:
        for name, noise in noises.items():
            add_expected(records, by_noise[name], name, noise, preset.sequences, sizes)
            advance()
    if target not in ("table1", "fig1", "fig4", "fig5"):
        records += _profiles(models, preset, noises, tunings, records, sizes, narrator)
    return Evaluation(records, {name: asdict(tuning) for name, tuning in tunings.items()})


def add_expected(
    records: list[Record],
    models: dict[Run, LinearTransformer],
    name: str,
    noise: Noise,
    sequences: int,
    sizes: dict[str, Any],
) -> None:
    """Adds to the record of each cell's best seed the loss that is to be expected."""
    best = best_seeds(records)
    of_run = {
        (record["model"], record["layers"], record["noise"], record["seed"]): record
        for record in records
        if record["read_after"] == record["layers"]
    }
    spiked = sizes | {"seed": sizes["seed"] + EXPECTATION, "sequences": sequences}
    problem = expected_problem(name, noise, **spiked)
    chosen = {run: model for run, model in models.items() if best[run[:3]] == run.seed}
    for scored in score_models(problem, chosen):
        if scored["read_after"] == scored["layers"]:
            of_run[scored["model"], scored["layers"], name, scored["seed"]] |= {
                "expected_loss": scored["adjusted_loss"],
                "expected_error": scored["standard_error"],
            }


def _profiles(
    models: dict[Run, LinearTransformer],
    preset: Preset,
    noises: dict[str, Noise],
    tunings: dict[str, Tuning],
    records: list[Record],
    sizes: dict[str, Any],
    narrator: Narrator,
) -> list[Record]:
    best = best_seeds(records)
    found: list[Record] = []
    with narrator.stage("profiles", len(noises) * preset.profile_points) as advance:
        for name, noise in noises.items():
            everything = name == "sigma_5"  # figures 5 to 7: all seeds, all layers, far out
            top = noise.largest + 1
            if everything or name.startswith("set"):
                top = max(10.0 if everything else 6.0, top)
            deep = preset.layers[-1:] if name.startswith("sigma") else preset.layers
            chosen = {
                run: model
                for run, model in models.items()
                if run.noise == name
                and (everything or (run.layers in deep and best[run[:3]] == run.seed))
            }
            points = [top * k / (preset.profile_points - 1) for k in range(preset.profile_points)]
            draws = [
                profile(
                    name,
                    noise,
                    points,
                    chosen,
                    tunings[name],
                    every_layer=everything,
                    sequences=preset.profile_sequences,
                    **sizes | {"seed": sizes["seed"] + PROFILES + draw},
                )
                for draw in range(preset.profile_draws)
            ]
            for drawn in zip(*draws, strict=True):
                found += [_without_draws(record) for record in typical(list(drawn))]
                advance()
    return found


def _without_draws(record: Record) -> Record:
    return {key: value for key, value in record.items() if key not in ("draws", "relative_error")}


def best_seeds(records: list[Record]) -> dict[tuple[str, int, str], int]:
    """For each (kind, layers, noise) the seed with the smallest adjusted loss."""
    best: dict[tuple[str, int, str], tuple[float, int]] = {}
    for record in records:
        if record["seed"] is None or record["sigma"] is not None:
            continue
        if record["read_after"] == record["layers"]:
            value = (adjusted_or_infinity(record), record["seed"])
            cell = (record["model"], record["layers"], record["noise"])
            best[cell] = min(best.get(cell, value), value)
    return {cell: seed for cell, (_, seed) in best.items()}
