"""A plan that takes no time."""

from __future__ import annotations

import torch

from rankone.bench.cases import Plan, Shape
from rankone.bench.clock import Effort

TINY = Plan(
    dtype=torch.float32,
    shapes=(Shape(1, 48, 2, 8, 12), Shape(1, 96, 2, 8, 12)),
    impls=("chunked", "sdpa", "transformers"),
    compared=40,
    copied=2**16,
    effort=Effort(rounds=(2, 2), seconds=0.1, warm_up=(1, 0.0)),
)
