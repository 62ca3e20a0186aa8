"""A folder of results: one configuration, whose targets add to each other.

    config.json          the configuration, and where it was made
    training.json        restarts, messages, time spent in training
    models/              a safetensors file a run
    checkpoints/         trainings that are not finished
    evaluation.json      flat records of all losses, and the tuned baselines

Everything that is there already is read and checked before anything is done.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rankone.icl.ensemble import Run
from rankone.icl.model import LinearTransformer
from rankone.storage import read_json, write_json

Record = dict[str, Any]


class Diary(NamedTuple):
    """How training went, over all calls."""

    restarts: dict[str, int]
    """Run name → restarts; only runs that are trained to the end are in it."""
    messages: list[str]
    training_seconds: float


def read_diary(out: Path) -> Diary:
    """What training.json says; empty if there is none."""
    path = out / "training.json"
    if not path.exists():
        return Diary({}, [], 0.0)
    found = _read_dict(path, {"restarts": dict, "messages": list, "training_seconds": (int, float)})
    counts = found["restarts"].values()
    if not all(type(count) is int for count in counts):
        raise _damaged(path, "restarts are not numbers")
    return Diary(found["restarts"], found["messages"], found["training_seconds"])


def write_diary(out: Path, diary: Diary) -> None:
    """Writes training.json."""
    write_json(out / "training.json", diary._asdict())


def model_path(out: Path, run: Run) -> Path:
    """Where a run's model is."""
    return out / "models" / f"{run.name}.safetensors"


def read_models(
    out: Path, runs: Iterable[Run], diary: Diary, dim: int
) -> dict[Run, LinearTransformer]:
    """The models that are there, each held to what its run says of it."""
    found = {}
    for run in runs:
        path = model_path(out, run)
        if run.name not in diary.restarts or not path.exists():
            continue
        model = LinearTransformer.load(path)
        if (model.kind, model.layers, model.dim) != (run.kind, run.layers, dim):
            raise ValueError(
                f"{path} holds a {model.kind} model with {model.layers} layers for {model.dim} "
                f"features, not {run.kind} with {run.layers} for {dim}; "
                "delete it and it is trained again"
            )
        found[run] = model
    return found


class Evaluation(NamedTuple):
    """What has been measured in a folder."""

    records: list[Record]
    tuned: dict[str, Any]

    def merged(self, newer: Evaluation) -> Evaluation:
        """Both; what is in both as it is in the newer one."""
        records = {_key(record): record for part in (self, newer) for record in part.records}
        return Evaluation(list(records.values()), {**self.tuned, **newer.tuned})


_KEY = ("model", "layers", "noise", "seed", "read_after", "sigma")


def _key(record: Record) -> tuple[Any, ...]:
    return tuple(record[name] for name in _KEY)


def read_evaluation(out: Path) -> Evaluation:
    """What evaluation.json holds; empty if there is none."""
    path = out / "evaluation.json"
    if not path.exists():
        return Evaluation([], {})
    found = _read_dict(path, {"records": list, "tuned": dict})
    for record in found["records"]:
        if not isinstance(record, dict) or not record.keys() >= {*_KEY, "loss", "adjusted_loss"}:
            raise _damaged(path, "a record is not whole")
    return Evaluation(found["records"], found["tuned"])


def write_evaluation(out: Path, evaluation: Evaluation) -> None:
    """Writes evaluation.json."""
    write_json(out / "evaluation.json", evaluation._asdict())


def _read_dict(path: Path, kinds: dict[str, Any]) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict):
        raise _damaged(path, "it is not an object")
    for key, kind in kinds.items():
        if not isinstance(found.get(key), kind):
            raise _damaged(path, f"{key} is missing or wrong")
    return found


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path} is not rankone's ({reason}); delete it and it is made again")


def checkpoint_folder(out: Path, target: str, runs: Iterable[Run]) -> Path:
    """Where the state of a training is; named after its runs too, since what is missing for a
    target may become less."""
    names = " ".join(sorted(run.name for run in runs))
    return out / "checkpoints" / f"{target}-{zlib.crc32(names.encode()):08x}"


def remove_checkpoints(out: Path, target: str) -> None:
    """Removes the checkpoints of a target whose runs are all trained."""
    parent = out / "checkpoints"
    for folder in parent.glob(f"{target}-*"):
        shutil.rmtree(folder)  # what a write left behind that was killed, too
    if parent.exists() and not any(parent.iterdir()):
        parent.rmdir()


__all__ = [
    "Diary",
    "Evaluation",
    "checkpoint_folder",
    "model_path",
    "read_diary",
    "read_evaluation",
    "read_models",
    "remove_checkpoints",
    "write_diary",
    "write_evaluation",
]
