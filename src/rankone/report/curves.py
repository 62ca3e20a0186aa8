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


class Curve(NamedTuple):
    """Points of a line, sorted by `x`; `spread` is the standard deviation over seeds."""

    x: Array
    y: Array
    spread: Array


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

    def mean_profile(
        self, model: str, layers: int | None, noise: Noise, read_after: int | None
    ) -> Curve | None:
        """Adjusted loss against the standard deviation: mean and spread over all seeds."""
        seeds = self._find(model, layers, noise, read_after)
        return _across_seeds(list(seeds.values()), "adjusted_loss")

    def by_layer(self, model: str, layers: int, noise: Noise) -> Curve | None:
        """Averaged adjusted loss of the prediction read after 0, 1, … layers, over all seeds."""
        points = []
        for read_after in range(layers + 1):
            values = [*self.averages(model, layers, noise, read_after).values()]
            finite = [value for value in values if math.isfinite(value)]
            if finite:
                points.append((read_after, np.mean(finite), np.std(finite)))
        return Curve(*np.array(points, dtype=np.float64).T) if points else None

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
    points = []
    for sigma in sorted({sigma for rows in seeds for sigma in rows if sigma is not None}):
        values = [number(rows[sigma][field]) for rows in seeds if sigma in rows]
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            points.append((sigma, np.mean(finite), np.std(finite)))
    return Curve(*np.array(points, dtype=np.float64).T) if points else None
