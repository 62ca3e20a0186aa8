"""The folder of a reproduction: a file for each group of models, and what was measured.

config.json      the resolved configuration, and where it was made
models/          GROUP.safetensors: trained matrices, losses and history of all its seeds
ahn.json         command, device, versions, date, commit, and flat records
figures/         figN.png and figN.pdf
report.md        the numbers beside the published ones
"""

from __future__ import annotations

from pathlib import Path

import torch

from rankone.icl.ahn.layers import Matrices, count_b
from rankone.icl.ahn.presets import Group
from rankone.icl.ahn.training import Trained
from rankone.storage import read_tensors, write_tensors

DIM = 5


def group_path(out: Path, group: Group) -> Path:
    """Where a group's models are."""
    return out / "models" / f"{group.name}.safetensors"


def write_group(out: Path, group: Group, trained: Trained) -> None:
    """Writes a group whose training is over."""
    tensors = {
        "A": trained.matrices.A,
        "B": trained.matrices.B,
        "history_A": trained.history.A,
        "history_B": trained.history.B,
        "training_loss": trained.training_loss,
        "starts": trained.starts,
        "steps": trained.steps,
        "few_steps": torch.tensor(trained.few_steps),
    }
    write_tensors(group_path(out, group), tensors, {"reproduction": "ahn", "group": group.name})


def read_group(out: Path, group: Group) -> Trained | None:
    """A group that is there; None if it is not, ValueError if it is another one."""
    path = group_path(out, group)
    if not path.exists():
        return None
    tensors, metadata = read_tensors(path)
    shape = (group.seeds, group.layers, DIM, DIM)
    if (
        metadata.get("group") != group.name
        or tuple(tensors["A"].shape) != shape
        or tensors["B"].shape[1] != count_b(group.family, group.layers)
    ):
        raise ValueError(
            f"{path} does not hold the group {group.name}; delete it, it is made again"
        )
    return Trained(
        Matrices(tensors["A"], tensors["B"]),
        tensors["training_loss"],
        tensors["starts"],
        int(tensors["few_steps"]),
        tensors["steps"],
        Matrices(tensors["history_A"], tensors["history_B"]),
    )


__all__ = ["group_path", "read_group", "write_group"]
