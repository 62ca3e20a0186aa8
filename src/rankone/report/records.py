"""What the report is made of: flat records, and the names that occur in them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NotRequired, TypedDict

MODELS = ("gd++", "diag", "full")
"""The trained kinds, in the order of the paper's table."""

BASELINES = ("constrr", "adarr", "tunedrr")
"""The closed-form rows of the paper's table."""

LABELS: Mapping[str, str] = {
    "gd++": "GD++",
    "diag": "DIAG",
    "full": "FULL",
    "constrr": "ConstRR",
    "adarr": "AdaRR",
    "tunedrr": "TunedRR",
    "bayes": "Bayes (floor)",
    "oracle": "Oracle",
}
"""How a model is written for readers."""


class Record(TypedDict):
    """One measured loss of one predictor.

    `read_after` counts the layers after which the prediction was read: `layers` for the
    model's own prediction, 0 for the zero predictor, None for a closed form. `sigma` is
    None for a loss averaged over the noise distribution, a standard deviation for one
    point of a per-variance profile. Losses are half mean squared errors, None where a model
    gave no finite one.
    """

    model: str
    layers: int | None
    noise: str
    seed: int | None
    read_after: int | None
    sigma: float | None
    loss: float | None
    adjusted_loss: float | None
    standard_error: float | None


class TableRecord(TypedDict):
    """One cell of Table 1.

    `adjusted_loss` is that of the median draw of prompts, `mean_loss` the mean over all draws,
    `expected_loss` an estimate of the expectation. `floor` is the adjusted loss of the
    Bayes-optimal predictor for this noise, `limit` the value that the cell is held to, `within`
    whether it keeps it (None: held to nothing).
    """

    model: str
    layers: int | None
    noise: str
    adjusted_loss: float | None
    standard_error: float | None
    published: float | None
    floor: float | None
    mean_loss: NotRequired[float | None]
    expected_loss: NotRequired[float | None]
    expected_error: NotRequired[float | None]
    published_standard_error: NotRequired[float | None]
    relative_error: NotRequired[float | None]
    seed: NotRequired[int | None]
    seeds: NotRequired[int | None]
    restarts: NotRequired[int | None]
    limit: NotRequired[float | None]
    within: NotRequired[bool | None]


class NothingToShowError(ValueError):
    """The records hold nothing of what a figure or a table is about."""


@dataclass(frozen=True)
class Noise:
    """A distribution of the noise's standard deviation, as the records name it."""

    name: str
    values: tuple[float, ...]
    """The largest value of a uniform distribution from 0, or the members of a set."""
    uniform: bool

    @property
    def largest(self) -> float:
        """The largest standard deviation that occurs."""
        return max(self.values)

    @property
    def label(self) -> str:
        """A table heading: `U(0, 5)`, `{1, 3}`, `no noise`."""
        if not self.uniform:
            return "{" + ", ".join(f"{value:g}" for value in self.values) + "}"
        return f"U(0, {self.largest:g})" if self.largest else "no noise"

    @property
    def sentence(self) -> str:
        """A panel title: `σ ~ U(0, 5)`, `σ ∈ {1, 3}`, `σ = 0`."""
        if not self.uniform:
            return f"σ ∈ {self.label}"
        return f"σ ~ {self.label}" if self.largest else "σ = 0"

    @property
    def latex(self) -> str:
        """A heading in LaTeX."""
        if not self.uniform:
            return r"$\{" + ", ".join(f"{value:g}" for value in self.values) + r"\}$"
        return rf"$\mathcal{{U}}(0, {self.largest:g})$" if self.largest else "no noise"


def parse_noise(name: str) -> Noise:
    """The distribution that a record's `noise` names.

    >>> parse_noise("sigma_5").label, parse_noise("set_1_3").label
    ('U(0, 5)', '{1, 3}')
    """
    number = r"\d+(?:\.\d+)?"
    if match := re.fullmatch(rf"sigma_({number})", name):
        return Noise(name, (float(match[1]),), uniform=True)
    if re.fullmatch(rf"set(?:_{number})+", name):
        values = sorted(float(value) for value in name.split("_")[1:])
        return Noise(name, tuple(values), uniform=False)
    raise ValueError(f"noise must look like 'sigma_5' or 'set_1_3', got {name!r}")


def noises_of(records: Iterable[Record] | Iterable[TableRecord]) -> list[Noise]:
    """The noise distributions that occur: uniform ones, then sets, each from small to large."""
    names = {record["noise"] for record in records}
    return sorted(map(parse_noise, names), key=lambda noise: (not noise.uniform, noise.values))


def is_worse(record: TableRecord) -> bool:
    """Whether a cell misses the limit that it is held to."""
    within = record.get("within")
    if within is not None:
        return not within
    limit = record.get("limit")
    return limit is not None and not number(record["adjusted_loss"]) <= limit


def number(value: float | None) -> float:
    """The value, or NaN where there is none: JSON has no other way to say it."""
    return math.nan if value is None else value


def layers_label(layers: int) -> str:
    """`1 layer`, `7 layers`."""
    return "1 layer" if layers == 1 else f"{layers} layers"
