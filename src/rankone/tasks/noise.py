"""Distributions of the label noise, always as standard deviations.

A distribution is known by its quantile function (so that several of them can share the same
uniform draws), its mean square, and a quadrature rule for integrals over it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


def _check_deviation(name: str, value: float) -> None:
    if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite standard deviation >= 0, got {value!r}")


def pick(
    values: tuple[float, ...], index: Int[Tensor, "*shape"], dtype: torch.dtype
) -> Float[Tensor, "*shape"]:
    """values[index], beyond the last one the last one; without a copy to the device, which waits.

    >>> pick((1.5, 3.0), torch.tensor([0, 1, 2]), torch.float32)
    tensor([1.5000, 3.0000, 3.0000])
    """
    found = torch.full(index.shape, values[0], dtype=dtype, device=index.device)
    for place, value in enumerate(values[1:], start=1):
        found.masked_fill_(index >= place, value)
    return found


class Noise(ABC):
    """A distribution of the noise's standard deviation sigma; one draw a prompt."""

    @abstractmethod
    def quantile(self, u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Maps uniform draws in [0, 1) to standard deviations."""

    @property
    @abstractmethod
    def mean_square(self) -> float:
        """E[sigma^2]: also the variance that the best constant ridge uses."""

    @abstractmethod
    def quadrature(self, nodes: int = 200) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
        """Points sigma_k and weights, so that E[f(sigma)] is close to sum_k weight_k f(sigma_k)."""

    @property
    @abstractmethod
    def largest(self) -> float:
        """The largest standard deviation that can be drawn."""


@dataclass(frozen=True)
class Uniform(Noise):
    """Standard deviations uniform on [low, high].

    >>> Uniform(0, 6).mean_square
    12.0
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_deviation("low", self.low)
        _check_deviation("high", self.high)
        if self.high < self.low:
            raise ValueError(f"high must be >= low, got low={self.low}, high={self.high}")

    def quantile(self, u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Linear from low to high."""
        return self.low + (self.high - self.low) * u

    @property
    def mean_square(self) -> float:
        """(low² + low high + high²) / 3."""
        return (self.low**2 + self.low * self.high + self.high**2) / 3

    def quadrature(self, nodes: int = 200) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
        """Gauss–Legendre in t with sigma = low + (high - low) t².

        The square makes the points dense near `low`: the posterior of a small sigma is narrow
        in proportion to sigma.
        """
        if self.high == self.low:
            return torch.tensor([float(self.low)], dtype=torch.float64), torch.ones(
                1, dtype=torch.float64
            )
        import numpy as np

        t, weight = np.polynomial.legendre.leggauss(nodes)
        t, weight = (t + 1) / 2, weight / 2
        sigma = self.low + (self.high - self.low) * t**2
        return torch.from_numpy(sigma), torch.from_numpy(2 * t * weight)

    @property
    def largest(self) -> float:
        """High."""
        return float(self.high)


@dataclass(frozen=True)
class Categorical(Noise):
    """A standard deviation chosen uniformly from a few values.

    >>> Categorical((1, 3)).mean_square
    5.0
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.values, Iterable):
            raise ValueError(f"values must be standard deviations, as (1, 3), got {self.values!r}")
        object.__setattr__(self, "values", tuple(self.values))
        if not self.values:
            raise ValueError("values must hold at least one standard deviation, got none")
        for value in self.values:
            _check_deviation("each of values", value)

    def quantile(self, u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Equal parts of [0, 1), in the order of the values."""
        return pick(self.values, (u * len(self.values)).long(), u.dtype)

    @property
    def mean_square(self) -> float:
        """The mean of the squares."""
        return sum(value**2 for value in self.values) / len(self.values)

    def quadrature(self, nodes: int = 200) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
        """The values themselves: exact, whatever `nodes`."""
        count = len(self.values)
        points = torch.tensor(self.values, dtype=torch.float64)
        return points, torch.full((count,), 1 / count, dtype=torch.float64)

    @property
    def largest(self) -> float:
        """The largest of the values."""
        return float(max(self.values))


@dataclass(frozen=True)
class Fixed(Noise):
    """One known standard deviation.

    >>> Fixed(0.5).mean_square
    0.25
    """

    value: float

    def __post_init__(self) -> None:
        _check_deviation("value", self.value)

    def quantile(self, u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The one value, whatever the draw."""
        return torch.full_like(u, self.value)

    @property
    def mean_square(self) -> float:
        """The value squared."""
        return float(self.value) ** 2

    def quadrature(self, nodes: int = 200) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
        """The value alone: exact, whatever `nodes`."""
        return torch.tensor([float(self.value)], dtype=torch.float64), torch.ones(
            1, dtype=torch.float64
        )

    @property
    def largest(self) -> float:
        """The value."""
        return float(self.value)


def noise_from_name(name: str) -> Noise:
    """The distribution behind a column of the published table.

    >>> noise_from_name("sigma_5"), noise_from_name("set_1_3")
    (Uniform(low=0.0, high=5.0), Categorical(values=(1.0, 3.0)))
    """
    family, *numbers = name.split("_")
    if family == "sigma" and len(numbers) == 1:
        return Uniform(0.0, float(numbers[0]))
    if family == "set" and numbers:
        return Categorical(tuple(float(number) for number in numbers))
    raise ValueError(f"noise must be named sigma_S or set_A_B…, got {name!r}")
