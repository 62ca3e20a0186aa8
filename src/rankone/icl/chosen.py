"""The models of a finished run that are worth a look: of every cell the best seed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple, get_args

from rankone.icl.ensemble import Run
from rankone.icl.folder import Diary, read_evaluation, read_models
from rankone.icl.model import Kind, LinearTransformer
from rankone.icl.scoring import best_seeds
from rankone.report.records import parse_noise
from rankone.storage import read_json
from rankone.tasks.noise import noise_from_name

_KINDS: dict[str, Kind] = {kind.replace("+", "p"): kind for kind in get_args(Kind)}
_NAME = re.compile(rf"({'|'.join(_KINDS)})-([1-9]\d*)-(.+)-seed(\d+)")


class Chosen(NamedTuple):
    """What a folder of `rankone icl reproduce` holds, one model for each kind, depth and noise."""

    config: dict[str, Any]
    models: dict[Run, LinearTransformer]
    losses: dict[Run, float | None]
    """Adjusted losses by evaluation.json; None where there is none."""

    @property
    def dim(self) -> int:
        """Features of a prompt."""
        return int(self.config["configuration"]["preset"]["dim"])

    @property
    def context(self) -> int:
        """Examples of a prompt."""
        return int(self.config["configuration"]["preset"]["context"])


def chosen_models(run: Path) -> Chosen:
    """The best seed of every kind, depth and noise by evaluation.json, or the first one.

    By noise in the order of the published table, then kind and depth.

    Raises ValueError if there is no such folder, if no model is in it, or if one of its files is
    damaged.
    """
    config = _read_config(run)
    runs = _list_runs(run)
    records = read_evaluation(run).records
    chosen = _best(runs, records)
    trained = Diary({each.name: 0 for each in chosen}, [], 0.0)  # a file is there when it is whole
    models = read_models(run, chosen, trained, config["configuration"]["preset"]["dim"])
    losses: dict[tuple[Any, ...], float | None] = {
        _cell(record): record["adjusted_loss"]
        for record in records
        if record["sigma"] is None and record["read_after"] == record["layers"]
    }
    return Chosen(config, models, {each: losses.get(tuple(each)) for each in models})


def _read_config(run: Path) -> dict[str, Any]:
    if not run.is_dir():
        raise ValueError(f"{run}: no such folder; name one that `rankone icl reproduce` made")
    file = run / "config.json"
    if not file.exists():
        raise ValueError(f"{run} holds no config.json; name a folder of `rankone icl reproduce`")
    found = read_json(file)
    match found:
        case {"configuration": {"preset": {"dim": int(dim), "context": int(context)}}}:
            if min(dim, context) >= 1:
                return dict(found)
    raise ValueError(f"{file} is not one of `rankone icl reproduce`; name a folder that it made")


def _list_runs(run: Path) -> list[Run]:
    """The runs whose models are there."""
    runs = []
    for path in sorted((run / "models").glob("*.safetensors")):
        found = _NAME.fullmatch(path.stem)
        try:
            if found is None:
                raise ValueError
            noise_from_name(found[3])
        except ValueError as error:
            raise ValueError(
                f"{path} is not named KIND-LAYERS-NOISE-seedSEED, as the models of "
                "`rankone icl reproduce` are; move it out of the folder"
            ) from error
        runs.append(Run(_KINDS[found[1]], int(found[2]), found[3], int(found[4])))
    if not runs:
        raise ValueError(
            f"{run / 'models'} holds no trained models; "
            f"finish `rankone icl reproduce TARGET --out {run} --resume` first"
        )
    return sorted(runs, key=lambda each: (noise_order(each.noise), *each))


def noise_order(name: str) -> tuple[Any, ...]:
    """Uniform distributions by their largest value, then sets: as in the published table."""
    noise = parse_noise(name)
    return (not noise.uniform, len(noise.values), noise.values)


def _best(runs: list[Run], records: list[dict[str, Any]]) -> list[Run]:
    """One run for each kind, depth and noise: the best one that is there, or the first."""
    there = {tuple(each) for each in runs}
    best = best_seeds([r for r in records if _cell(r) in there])
    chosen: dict[tuple[Any, ...], Run] = {}
    for each in runs:
        if best.get(each[:3], each.seed) == each.seed:
            chosen.setdefault(each[:3], each)
    return list(chosen.values())


def _cell(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[key] for key in ("model", "layers", "noise", "seed"))
