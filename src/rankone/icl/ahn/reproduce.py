"""Reproduces figures 1 to 7 of Ahn et al. 2023 and Theorem 1, from nothing to a report."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from rankone import provenance
from rankone.icl.ahn.figures import fig6, fig7, loss_figure, matrices_figure
from rankone.icl.ahn.folder import read_group, write_group
from rankone.icl.ahn.layers import Matrices
from rankone.icl.ahn.measures import (
    distance,
    draw_losses,
    fresh_prompts,
    layer_order,
    multiple,
    shown,
)
from rankone.icl.ahn.presets import FIGURES, PRESETS, Group, Preset, groups
from rankone.icl.ahn.published import LBFGS_LOSSES, MULTIPLES
from rankone.icl.ahn.records import (
    TEST_SEED,
    Record,
    baseline_records,
    model_records,
    optimum_records,
    problem_of,
    published_records,
    theorem1_records,
)
from rankone.icl.ahn.report import report
from rankone.icl.ahn.training import Recipe, Trained, train
from rankone.progress import Narrator
from rankone.report.figures.files import save
from rankone.results import prepare_folder
from rankone.storage import write_json, write_text

LARGEST_SEED = 100_000


def reproduce_ahn(
    out: Path,
    *,
    preset: str = "laptop",
    resume: bool = False,
    seed: int = 0,
    quiet: bool = False,
) -> Path:
    """Trains, measures, draws and writes ahn.json, figures and report.md into `out`; its path.

    `seed` gives the rotation, and all first values and prompts. A folder holds one configuration.
    With `resume` groups that are trained are used again; an interruption loses the group at hand.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed must be from 0 to {LARGEST_SEED}, got {seed}")
    size = PRESETS[preset]
    config = {"reproduction": "ahn", "preset": asdict(size), "seed": seed}
    prepare_folder(out, config, resume=resume)
    stamp, began = provenance.collect(), time.monotonic()
    with Narrator(quiet=quiet) as narrator:
        trained = {
            group: _read_or_train(out, group, size, seed, narrator) for group in groups(size)
        }
        records = _measure(trained, size, seed, narrator)
        _draw(out, trained, records, size, seed, narrator)
    seconds = round(time.monotonic() - began, 1)
    result: dict[str, Any] = stamp | {"seconds": seconds, "stages": narrator.seconds}
    result["records"] = records
    write_json(out / "ahn.json", result)
    page = out / "report.md"
    write_text(page, report(result, [f"figures/{name}.png" for name in FIGURES]))
    if not quiet:
        Console().print(f"done in {seconds:.0f} s; {page}", highlight=False, soft_wrap=True)
    return page


def _read_or_train(out: Path, group: Group, size: Preset, seed: int, narrator: Narrator) -> Trained:
    found = read_group(out, group)
    if found is not None:
        return found
    recipe = Recipe(**group.recipe(size))
    total = recipe.few_iterations + recipe.iterations
    seeds = [1000 * seed + row for row in range(group.seeds)]
    with narrator.stage(f"training {group.name}", total) as advance:
        trained = train(
            problem_of(group, seed), group.family, group.layers, seeds, recipe, progress=advance
        )
    write_group(out, group, trained)
    return trained


def _measure(
    trained: dict[Group, Trained], size: Preset, seed: int, narrator: Narrator
) -> list[Record]:
    records: list[Record] = []
    with narrator.stage("measuring", len(trained) + 3) as advance:
        for group, models in trained.items():
            records += model_records(group, models, size, seed)
            if group.weights == "identity":
                records += theorem1_records(group, models, seed)
            advance()
        records += optimum_records(size)
        advance()
        records += published_records(size, seed)
        advance()
        records += baseline_records(size, seed)
        advance()
    return records


def _draw(
    out: Path,
    trained: dict[Group, Trained],
    records: list[Record],
    size: Preset,
    seed: int,
    narrator: Narrator,
) -> None:
    named = {group.name: (group, models) for group, models in trained.items()}
    with narrator.stage("figures", len(FIGURES)) as advance:
        for name in FIGURES:
            save(_figure(name, named, records, size, seed), out / "figures", name)
            advance()


def _figure(
    name: str,
    named: dict[str, tuple[Group, Trained]],
    records: list[Record],
    size: Preset,
    seed: int,
) -> Figure:
    if name == "fig6":
        return fig6(records)
    if name == "fig7":
        return fig7(records)
    group, models = named["theorem3" if name in ("fig1", "fig2") else "theorem4"]
    if name in ("fig1", "fig3"):
        levels = {"exact optimum in expectation": _exact(records, group)}
        if name == "fig3":
            levels["published (L-BFGS, training prompts)"] = LBFGS_LOSSES[-1]
        title = f"Figure {name[3]}: loss, three layers of Theorem {group.family[-1]}"
        steps, losses = models.steps.double().numpy(), _curve(group, models, size, seed)
        return loss_figure(title, steps, losses, models.few_steps, levels)
    return _matrices(name, group, models, seed)


def _exact(records: list[Record], group: Group) -> float:
    key = ("optimum", group.family, group.layers, group.context, 0)
    names = ("record", "family", "layers", "examples", "rank")
    return next(float(r["loss"]) for r in records if tuple(r.get(n) for n in names) == key)


def _curve(group: Group, models: Trained, size: Preset, seed: int) -> Any:
    """Losses [T, R] on fresh prompts along the training."""
    problem = problem_of(group, seed)
    draws = fresh_prompts(problem, size.curve_draws, size.prompts, seed=TEST_SEED)
    medians = [
        draw_losses(Matrices(A, B), problem, draws).median(0).values
        for A, B in zip(*models.history, strict=True)
    ]
    return np.stack([median.numpy() for median in medians])


def _matrices(name: str, group: Group, models: Trained, seed: int) -> Figure:
    """Figure 2, 4 or 5; the matrices are those of the model with the least training loss."""
    problem = problem_of(group, seed)
    kind = "B" if name == "fig4" else "A"
    final = getattr(shown(models.matrices, problem), kind)
    history = getattr(shown(models.history, problem), kind)
    published = MULTIPLES[group.family][kind]
    if group.family == "theorem3":
        order = layer_order(multiple(final), published)
        final = final.take_along_dim(order[..., None, None], 1)
        history = history.take_along_dim(order[None, ..., None, None], 2)
    best = int(models.training_loss.argmin())
    label = "$B_{}$" if kind == "B" else r"$\Sigma^{{1/2}} A_{} \Sigma^{{1/2}}$"
    what = "B" if kind == "B" else "Σ^½ A Σ^½"
    return matrices_figure(
        f"Figure {name[3]}: {what}, three layers of Theorem {group.family[-1]}",
        [label.format(layer) for layer in range(final.shape[1])],
        models.steps.double().numpy(),
        distance(history).numpy(),
        models.few_steps,
        final[best].numpy(),
        published,
    )


__all__ = ["reproduce_ahn"]
