"""Numbers printed in the papers, as data."""

from __future__ import annotations

import csv
from importlib.resources import files

NOISES = (*(f"sigma_{s}" for s in range(8)), "set_1_3", "set_1_3_5")
"""Columns of Table 1: sigma_S is U(0, S), set_A_B is a uniform choice; standard deviations."""


def table1() -> dict[tuple[str, int | None, str], float]:
    """Table 1 of Vladymyrov et al. 2024: (model, layers, noise) → adjusted evaluation loss.

    >>> table1()["full", 7, "sigma_5"]
    0.047
    >>> table1()["constrr", None, "set_1_3"]
    0.222
    """
    text = (files(__name__) / "table1.csv").read_text()
    found = {}
    for row in csv.DictReader(text.splitlines()):
        layers = int(row["layers"]) if row["layers"] else None
        for noise in NOISES:
            found[row["model"], layers, noise] = float(row[noise])
    return found
