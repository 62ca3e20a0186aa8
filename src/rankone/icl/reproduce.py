"""Reproduces Table 1 and figures 1 to 7 of Vladymyrov et al. 2024, from nothing to a report."""

from __future__ import annotations

import time
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rankone import provenance
from rankone.devices import pick_device
from rankone.icl.cells import make_table
from rankone.icl.ensemble import Run
from rankone.icl.fitting import fit
from rankone.icl.model import Kind, LinearTransformer
from rankone.icl.presets import FIGURES, KINDS, PRESETS, TARGETS, Preset
from rankone.icl.progress import Narrator
from rankone.icl.scoring import evaluate
from rankone.icl.training import Recipe
from rankone.storage import read_json, write_json
from rankone.tasks.noise import noise_from_name


def runs_for(target: str, preset: Preset, seed: int) -> list[Run]:
    """The models that a target needs."""

    def grid(
        noises: tuple[str, ...], layers: tuple[int, ...], kinds: tuple[Kind, ...]
    ) -> list[Run]:
        seeds = range(seed, seed + preset.seeds)
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
    interrupted reproduction goes on, and models that are there are used again.
    """
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {target!r}")
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    size = PRESETS[preset]
    where = pick_device(device)
    recipe = Recipe(**size.recipe)
    config = {"preset": asdict(size), "recipe": asdict(recipe), "seed": seed}
    prepare_folder(out, config, resume=resume)
    started = time.monotonic()
    narrator = Narrator(quiet=quiet)
    with narrator:
        runs = runs_for(target, size, seed)
        models, facts = train_missing(runs, size, recipe, out, target, where, narrator)
        records, tunings = evaluate(models, size, seed, where, narrator, target)
        spent = {"seconds": round(time.monotonic() - started, 1), **facts}
        write_json(out / "evaluation.json", {"records": records, "tuned": tunings})
        stamp = {**provenance.collect(where.type), **spent}
        table = make_table(records, facts["restarts"], size)
        from rankone.icl.publish import WITH_TABLE, publish, write_result

        page = publish(out, target, table, records, models, config, stamp, narrator)
    seconds = time.monotonic() - started
    if target in WITH_TABLE:  # the whole time is known only now
        stamp["seconds"] = round(seconds, 1)
        stamp["stages"] = {"training": facts["training_seconds"], **narrator.seconds}
        write_result(out / "table1.json", table, stamp)
    narrator.finish(table, page, target, seconds)
    return page


def prepare_folder(out: Path, config: dict[str, Any], *, resume: bool) -> None:
    """Makes a folder this configuration's, or says in one line why it cannot be."""
    file = out / "config.json"
    if file.exists():
        found = read_json(file)
        found = found.get("configuration") if isinstance(found, dict) else None
        if found != _plain(config):
            raise ValueError(
                f"{out} holds the results of another configuration ({_difference(found, config)}); "
                "choose another --out"
            )
        if not resume:
            raise ValueError(
                f"{out} holds results of this configuration already; "
                "add --resume to go on with them, or choose another --out"
            )
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not a folder of results; choose another --out")
    else:
        stamp = provenance.collect("cpu")
        write_json(file, {"configuration": config, **stamp})


def _plain(config: Any) -> Any:
    """The configuration as JSON gives it back."""
    if isinstance(config, dict):
        return {key: _plain(value) for key, value in config.items()}
    return [_plain(value) for value in config] if isinstance(config, (list, tuple)) else config


def _difference(found: Any, wanted: dict[str, Any]) -> str:
    """The first setting in which two configurations differ."""
    if not isinstance(found, dict):
        return "its config.json is not one of rankone's"
    for part, value in _plain(wanted).items():
        other = found.get(part)
        if isinstance(value, dict) and isinstance(other, dict):
            for key in value:
                if value[key] != other.get(key):
                    return f"{part} {key}: {other.get(key)} there, {value[key]} asked for"
        elif other != value:
            return f"{part}: {other} there, {value} asked for"
    return "it was made by another version"


def train_missing(
    runs: list[Run],
    preset: Preset,
    recipe: Recipe,
    out: Path,
    target: str,
    device: torch.device,
    narrator: Narrator,
) -> tuple[dict[Run, LinearTransformer], dict[str, Any]]:
    """Loads the models that are there and trains the others together."""
    folder, diary = out / "models", out / "training.json"
    facts: dict[str, Any] = {"restarts": {}, "messages": [], "training_seconds": 0.0}
    if diary.exists():
        facts = read_json(diary)
    models = {
        run: LinearTransformer.load(folder / f"{run.name}.safetensors")
        for run in runs
        if (folder / f"{run.name}.safetensors").exists() and run.name in facts["restarts"]
    }
    missing = [run for run in runs if run not in models]
    if missing:
        noises = {run.noise: noise_from_name(run.noise) for run in missing}
        # Named after the runs too: what is missing may have become less since an interruption.
        names = " ".join(sorted(run.name for run in missing))
        checkpoints = out / "checkpoints" / f"{target}-{zlib.crc32(names.encode()):08x}"
        fitted = fit(
            missing,
            noises,
            recipe,
            dim=preset.dim,
            context=preset.context,
            device=device,
            checkpoints=checkpoints,
            progress=narrator.training(len(missing), recipe),
        )
        for run, model in fitted.models.items():
            model.save(folder / f"{run.name}.safetensors")
        facts["restarts"] |= {run.name: count for run, count in fitted.restarts.items()}
        facts["messages"] += fitted.messages
        facts["training_seconds"] = round(facts["training_seconds"] + fitted.seconds, 1)
        write_json(diary, facts)
        models |= fitted.models
        for file in checkpoints.glob("*.safetensors"):
            file.unlink()
    return {run: models[run] for run in runs}, facts


__all__ = ["FIGURES", "prepare_folder", "reproduce", "runs_for"]
