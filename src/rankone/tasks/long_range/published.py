"""Accuracies of the long range arena as published, in percent, from published.csv.

The recipe of Xiong et al. 2021, two layers of width 64, is the one that `rankone train` follows;
Tay et al. 2021 have larger models. On ListOps the most frequent answer gets 17 %.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Published(NamedTuple):
    """An accuracy in percent, and whose it is."""

    accuracy: float
    source: str


@cache
def _rows() -> tuple[dict[str, str], ...]:
    text = (files("rankone.tasks.long_range") / "published.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def published(task: str, mechanism: str) -> Published | None:
    """The published accuracy by the nearer recipe, None if there is none.

    >>> published("listops", "bigbird")
    Published(accuracy=36.05, source='Tay et al. 2021')
    """
    for row in _rows():
        if row["mechanism"] == mechanism:
            return Published(float(row[task]), row["source"])
    return None
