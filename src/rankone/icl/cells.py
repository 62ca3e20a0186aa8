"""From evaluation records to the cells of Table 1, each with the value that it is held to."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, cast

from rankone.icl.evaluation import Record, adjusted_or_infinity
from rankone.icl.gdpp import gap_to_constant_ridge
from rankone.icl.presets import Preset
from rankone.icl.published import table1
from rankone.tasks.noise import noise_from_name

if TYPE_CHECKING:
    from rankone.icl.model import Kind

NOISE_FREE_LIMIT = 1e-6
"""Limit of noise-free cells with five layers and more: below it float32 and patience decide."""

ROUNDING = 0.0005
"""Half a unit of the last printed digit: closed forms are compared, not only bounded."""

OWN_TAIL = 25.0
"""A cell whose adjusted loss varies between prompts by more than this times its mean, in half of
all draws, owes it to a few exploding ones. The published table's error, estimated from the same
prompts, would be as large: it is not granted."""


def make_table(records: list[Record], restarts: dict[str, int], preset: Preset) -> list[Record]:
    """Table records: the best seed of every trained cell, and the closed forms.

    Losses are those of the median draw; `mean_loss` is the mean over all draws, `expected_loss`
    an importance-sampled estimate of the expectation.

    A trained cell is held to the published value plus two standard errors of the published
    table (the median over the draws). GD++ cannot beat constant ridge; where the
    published value does, the cell is held to the best that GD++ of that depth can do. Closed
    forms are held to two standard errors either way.
    """
    from rankone.icl.ensemble import Run

    averaged = [record for record in records if record["sigma"] is None]
    floors = {r["noise"]: r["adjusted_loss"] for r in averaged if r["model"] == "bayes"}
    ridges = {r["noise"]: r["adjusted_loss"] for r in averaged if r["model"] == "constrr"}
    published = table1()
    cells: dict[tuple[str, int | None, str], list[Record]] = {}
    for record in averaged:
        if record["read_after"] == record["layers"] and record["model"] != "oracle":
            key = (record["model"], record["layers"], record["noise"])
            cells.setdefault(key, []).append(record)
    table = []
    for (model, layers, noise), tries in cells.items():
        best = min(tries, key=adjusted_or_infinity)
        entry = {
            "model": model,
            "layers": layers,
            "noise": noise,
            "adjusted_loss": best["adjusted_loss"],
            "standard_error": best["standard_error"],
            "published": published.get((model, layers, noise)),
            "floor": floors.get(noise),
            "mean_loss": _mean(best.get("draws", [best["adjusted_loss"]])),
            "expected_loss": best.get("expected_loss"),
            "expected_error": best.get("expected_error"),
            "published_standard_error": best["published_standard_error"],
            "relative_error": best["relative_error"],
            "seed": best["seed"],
            "seeds": len(tries) if layers else None,
            "restarts": None,
            "limit": None,
            "within": None,
        }
        if layers is not None:
            names = [Run(cast("Kind", model), layers, noise, r["seed"]).name for r in tries]
            entry["restarts"] = sum(restarts.get(name, 0) for name in names)
        _judge(entry, ridges.get(noise), preset)
        table.append(entry)
    return table


def _mean(losses: list[float | None]) -> float | None:
    finite = [loss for loss in losses if loss is not None]
    return sum(finite) / len(finite) if len(finite) == len(losses) else None


def _judge(entry: Record, ridge: float | None, preset: Preset) -> None:
    """Sets `limit` and `within` of a cell that has a published value."""
    value, published = entry["adjusted_loss"], entry["published"]
    error = entry["published_standard_error"] or 0.0
    if published is None:
        return
    if entry["layers"] is None:
        entry["limit"] = published + 2 * error + ROUNDING
        entry["within"] = value is not None and abs(value - published) <= 2 * error + ROUNDING
        return
    if (entry["relative_error"] or 0.0) * preset.sequences**0.5 > OWN_TAIL:
        error = 0.0
    entry["limit"] = published + 2 * error
    if entry["noise"] == "sigma_0" and entry["layers"] >= 5:
        entry["limit"] = NOISE_FREE_LIMIT
    elif entry["model"] == "gd++" and ridge is not None and published < ridge:
        gap = _gap(
            min(entry["layers"], 3), preset.dim, preset.context, _mean_square(entry["noise"])
        )
        own = 2 * (entry["standard_error"] or 0.0)
        entry["limit"] = max(entry["limit"], ridge + gap + own)
    entry["within"] = value is not None and value <= entry["limit"]


@cache
def _gap(layers: int, dim: int, context: int, variance: float) -> float:
    return gap_to_constant_ridge(layers, dim=dim, context=context, variance=variance)


def _mean_square(noise: str) -> float:
    return noise_from_name(noise).mean_square
