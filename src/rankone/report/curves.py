"""Records grouped into the curves that the figures draw."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankone.report.records import Noise, NothingToShowError, Record, noises_of, number, parse_noise

Array = NDArray[np.float64]
Field = Literal["loss", "adjusted_loss"]
_Key = tuple[str, int | None, str, int | None]


EXPLODED = 1e9
"""Where a loss that is not a number is drawn: far outside every axis, but not left out."""


class Curve(NamedTuple):
    """Points of a line, sorted by `x`: the median over seeds, and the quartiles."""

    x: Array
    y: Array
    low: Array
    high: Array

    @classmethod
    def of(cls, points: dict[float, list[float]]) -> Curve | None:
        """The values of all seeds at each x; quartiles are values, the outer ones in between."""
        if not points:
            return None
        rows = []
        for x, values in sorted(points.items()):
            ordered = sorted(value if value < EXPLODED else EXPLODED for value in values)
            last = len(ordered) - 1
            rows.append((x, ordered[last // 2], ordered[last // 4], ordered[-1 - last // 4]))
        return cls(*np.array(rows, dtype=np.float64).T)

    def until(self, end: float) -> Curve:
        """The part with x up to `end`, and the next point, so that the line reaches the edge."""
        last = int(np.searchsorted(self.x, end - 1e-9)) + 1
        return Curve(*(part[:last] for part in self))


class Curves:
    """An index of evaluation records, built once and asked many times.

    A prediction is named by model, layers, noise and the number of layers it was read
    after; under it lie seeds, and under a seed one record for each `sigma`.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        rows = list(records)
        self.noises = noises_of(rows)
        self._seeds: dict[_Key, dict[int | None, dict[float | None, Record]]] = defaultdict(dict)
        for row in rows:
            read_after = row["layers"] if row["read_after"] is None else row["read_after"]
            key = (row["model"], row["layers"], row["noise"], read_after)
            self._seeds[key].setdefault(row["seed"], {})[row["sigma"]] = row

    def depths(self, noise: Noise, models: Iterable[str]) -> list[int]:
        """Numbers of layers with a trained model among `models` for this noise."""
        wanted = set(models)
        found = {
            layers
            for model, layers, name, _ in self._seeds
            if model in wanted and name == noise.name and layers is not None
        }
        return sorted(found)

    def averages(
        self, model: str, layers: int | None, noise: Noise, read_after: int | None = None
    ) -> dict[int | None, float]:
        """Seed → adjusted loss averaged over the noise distribution."""
        seeds = self._find(model, layers, noise, read_after)
        return {
            seed: number(rows[None]["adjusted_loss"])
            for seed, rows in seeds.items()
            if None in rows
        }

    def best_seed(self, model: str, layers: int | None, noise: Noise) -> int | None:
        """The seed with the lowest averaged adjusted loss; without averages the first."""
        averages = self.averages(model, layers, noise)
        finite = {seed: value for seed, value in averages.items() if math.isfinite(value)}
        if finite:
            return min(finite, key=lambda seed: finite[seed])
        return next(iter(self._find(model, layers, noise, None)), None)

    def best(self, model: str, layers: int | None, noise: Noise) -> float | None:
        """The averaged adjusted loss of the best seed."""
        return self.averages(model, layers, noise).get(self.best_seed(model, layers, noise))

    def profile(
        self, model: str, layers: int | None, noise: Noise, field: Field = "adjusted_loss"
    ) -> Curve | None:
        """Loss against the noise's standard deviation, of the best seed."""
        seeds = self._find(model, layers, noise, None)
        best = seeds.get(self.best_seed(model, layers, noise), {})
        return _across_seeds([best], field)

    def seeds_profile(
        self, model: str, layers: int | None, noise: Noise, read_after: int | None
    ) -> Curve | None:
        """Adjusted loss against the standard deviation, over all seeds."""
        seeds = self._find(model, layers, noise, read_after)
        return _across_seeds(list(seeds.values()), "adjusted_loss")

    def by_layer(self, model: str, layers: int, noise: Noise) -> Curve | None:
        """Averaged adjusted loss of the prediction read after 0, 1, … layers, over all seeds."""
        found = {
            float(read_after): [*self.averages(model, layers, noise, read_after).values()]
            for read_after in range(layers + 1)
        }
        return Curve.of({read_after: values for read_after, values in found.items() if values})

    def uniform(self) -> list[Noise]:
        """The uniform distributions among the records."""
        return [noise for noise in self.noises if noise.uniform]

    def sets(self) -> list[Noise]:
        """The categorical distributions among the records."""
        return [noise for noise in self.noises if not noise.uniform]

    def reference_noise(self) -> Noise:
        """The noise of the single-noise figures: U(0, 5), or else the nearest that was measured."""
        preferred = parse_noise("sigma_5")
        if preferred in self.noises:
            return preferred
        for group in (self.uniform(), self.sets()):
            if group:
                return min(group, key=lambda noise: abs(noise.largest - preferred.largest))
        raise NothingToShowError("there are no evaluation records to draw")

    def _find(
        self, model: str, layers: int | None, noise: Noise, read_after: int | None
    ) -> dict[int | None, dict[float | None, Record]]:
        read = layers if read_after is None else read_after
        return self._seeds.get((model, layers, noise.name, read), {})


def _across_seeds(seeds: list[dict[float | None, Record]], field: Field) -> Curve | None:
    points: dict[float, list[float]] = defaultdict(list)
    for rows in seeds:
        for sigma, row in rows.items():
            if sigma is not None:
                points[sigma].append(number(row[field]))
    return Curve.of(points)
