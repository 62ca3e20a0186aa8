"""Packed sequences one by one: what a reference does with them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

Recurrence = Callable[..., tuple[Tensor, Tensor]]
"""Tensors [1, T, …] or None, the state [1, H, K, V] and the scale → outputs and the last state."""


def each_sequence(
    recurrence: Recurrence,
    tensors: tuple[Tensor | None, ...],
    states: Tensor,
    scale: float,
    offsets: list[int],
) -> tuple[Tensor, Tensor]:
    """Outputs [1, T, H, V] and last states [N, H, K, V]; an empty sequence keeps its state."""
    outputs, finals = [], []
    for n, (begin, end) in enumerate(pairwise(offsets)):
        state = states[n : n + 1]
        if end > begin:
            own = (x if x is None else x[:, begin:end] for x in tensors)
            output, state = recurrence(*own, state, scale)
            outputs.append(output)
        finals.append(state)
    return torch.cat(outputs, dim=1), torch.cat(finals)
