"""Token mixers of the literature behind one call; `build` makes one by its name."""

from __future__ import annotations

from typing import Any

from rankone.layers.base import Facts, Layer
from rankone.layers.bigbird import BigBird
from rankone.layers.linear import Linear
from rankone.layers.linformer import Linformer, Projections
from rankone.layers.long_short import LongShort
from rankone.layers.longformer import Longformer
from rankone.layers.nystromformer import Nystromformer
from rankone.layers.performer import Performer
from rankone.layers.rfa import RFA
from rankone.layers.softmax import Softmax

MECHANISMS: dict[str, type[Layer]] = {
    layer.name: layer
    for layer in (
        Softmax, Linear, Performer, RFA, Linformer, Nystromformer, Longformer, BigBird, LongShort,
    )
}  # fmt: skip
"""All mechanisms by name; `MECHANISMS[name].facts` says what one can do."""


def build(name: str, *, dim: int, heads: int, causal: bool = False, **options: Any) -> Layer:
    """A layer of a mechanism.

    >>> build("performer", dim=64, heads=4, causal=True, features=32)
    Performer(
      64, heads=4, causal=True
      (query): Linear(in_features=64, out_features=64, bias=True)
      (key): Linear(in_features=64, out_features=64, bias=True)
      (value): Linear(in_features=64, out_features=64, bias=True)
      (out): Linear(in_features=64, out_features=64, bias=True)
    )

    Raises ValueError for a mechanism that is not there, for options that it does not have, and for
    what its mathematics does not allow, naming mechanisms that can.
    """
    if name not in MECHANISMS:
        raise ValueError(f"mechanism must be one of {', '.join(MECHANISMS)}, got {name!r}")
    try:
        return MECHANISMS[name](dim, heads, causal=causal, **options)
    except TypeError as error:
        raise ValueError(f"{name} does not take these options: {error}") from error


__all__ = [
    "MECHANISMS",
    "RFA",
    "BigBird",
    "Facts",
    "Layer",
    "Linear",
    "Linformer",
    "LongShort",
    "Longformer",
    "Nystromformer",
    "Performer",
    "Projections",
    "Softmax",
    "build",
]
