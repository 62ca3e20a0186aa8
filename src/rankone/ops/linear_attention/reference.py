"""Linear attention as it is defined, a token at a time: short, and never optimised."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def forward(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    decay: Float[Tensor, "B T H"] | None,
    state: Float[Tensor, "B H K V"],
    scale: float,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """Outputs and the last state, both in the state's dtype."""
    q, k, v = (x.to(state.dtype) for x in (q, k, v))
    outputs = []
    for t in range(q.shape[1]):
        if decay is not None:
            state = decay[:, t, :, None, None].to(state.dtype).exp() * state
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, dim=1), state
