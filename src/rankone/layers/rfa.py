"""Random feature attention: softmax attention of unit vectors by random Fourier features."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from rankone.layers.base import Facts
from rankone.layers.features import FeatureLayer, read, summed
from rankone.ops import feature_maps, linear_attention

FLOOR = 0.05
"""Least normaliser for each key that it sums over: the kernel of unit vectors is at least e⁻², and
what random features make of it may be anything, also negative."""


class RandomFeatureState(NamedTuple):
    """Σ φ(k) [v, 1]ᵀ, and the weights that were summed."""

    sums: Float[Tensor, "B H F V1"]
    weight: Float[Tensor, "B H"]


class RFA(FeatureLayer):
    """Attention with φ(x) = [sin W σx, cos W σx] / √F on queries and keys of length 1.

    E[φ(q)·φ(k)] = e^(-‖σ(q - k)‖² / 2), which is e^(q·k) but for a constant where σ = 1. σ is
    learned, one number for each coordinate of a head. With `gate` the past fades, by a number that
    every token decides for every head:

        S_t = g_t S_{t-1} + (1 - g_t) φ(k_t) v_tᵀ,  z_t = g_t z_{t-1} + (1 - g_t) φ(k_t)

    Normalisers are kept at or above `FLOOR` times the weights that they sum.

    Args:
        features: F, rows of W; there are 2 F features.
        gate: fade; causal only.
        temperature: σ is 1/temperature at first, on top of what is learned.
        seed: of the projection.

    Peng et al. 2021, equations 3 to 8.
    """

    name = "rfa"
    facts = Facts(
        title="Random Feature Attention",
        paper="Peng et al. 2021",
        cost="T",
        state="2 F V + 2 F + 1 a head",
        exact="softmax attention of unit vectors in expectation; error ~ 1/√F",
        causal=True,
        streams=True,
        cross=True,
    )

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        features: int = 64,
        gate: bool = False,
        temperature: float = 1.0,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(dim, heads, **options)
        if gate and not self.causal:
            raise ValueError("gate says how the past fades: it needs causal=True")
        if features < 1 or temperature <= 0:
            raise ValueError(
                f"features must be at least 1 and temperature positive, "
                f"got {features} and {temperature}"
            )
        self.gate = nn.Linear(dim, heads) if gate else None
        self.sigma = nn.Parameter(torch.full((heads, self.head_dim), 1.0 / temperature))
        self.projection: Tensor
        self.register_buffer("projection", torch.empty(heads, features, self.head_dim))
        self.redraw(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def redraw(self, generator: Generator) -> None:
        """Another projection, of its own for every head."""
        heads, features, dim = self.projection.shape
        for h in range(heads):
            drawn = feature_maps.orthogonal_projection(features, dim, generator=generator)
            self.projection[h].copy_(drawn)

    def features(self, x: Tensor, *, query: bool) -> Tensor:
        """Of x brought to length 1."""
        unit = torch.nn.functional.normalize(x, dim=-1, eps=1e-6)
        return feature_maps.random_fourier(unit * self.sigma, self.projection)

    def mix(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Causal as a stream, else all read the same sums."""
        return self.stream(x, mask, None)[0] if self.causal else self.cross(x, x, mask)

    def cross(self, x: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        """The sums of the context, read by the queries of x."""
        q = self.features(self._heads(self.query(x)), query=True)
        k, v = self._keys(self._heads(self.key(context)), mask), self._heads(self.value(context))
        above, below = read(q, summed(k, v))
        number = context.shape[1] if mask is None else mask.sum(1).view(-1, 1, 1, 1)
        return _divided(above, below, number).to(v.dtype)

    def stream(self, x: Tensor, mask: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        """One more value, 1 for every token, makes the normaliser."""
        q, k, v = self._mapped(x, mask)
        weight = (
            v.new_ones(v.shape[:3]) if mask is None else mask[..., None].to(v).expand_as(v[..., 0])
        )
        decay = None
        if self.gate is not None:
            gate = self.gate(x)
            gate = gate.to(torch.promote_types(gate.dtype, torch.float32))
            decay = torch.nn.functional.logsigmoid(gate)
            if mask is not None:
                decay = decay * mask[..., None]
            weight = weight * torch.sigmoid(-gate).to(weight.dtype)
            k = k * weight[..., None].to(k.dtype)
        values = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1).to(q.dtype)
        output, sums = linear_attention(
            q, k, values, decay=decay, scale=1.0, output_final_state=True,
            initial_state=None if state is None else state.sums,
        )  # fmt: skip
        total, last = _running(weight, decay, None if state is None else state.weight)
        assert isinstance(sums, Tensor)
        heads = _divided(output[..., :-1], output[..., -1:], total[..., None])
        return heads.to(v.dtype), RandomFeatureState(sums, last)


def _divided(above: Tensor, below: Tensor, weight: Tensor | int) -> Tensor:
    """Above over below, which is kept away from 0; 0 where nothing was summed."""
    floor = torch.as_tensor(weight, device=below.device, dtype=below.dtype) * FLOOR
    return above / torch.maximum(below, floor).clamp_min(1e-12)


def _running(weight: Tensor, decay: Tensor | None, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weights [B, T, H] that each token sums over, and the last ones [B, H]."""
    ones = weight[..., None]
    state = None if start is None else start[..., None, None]
    found, last = linear_attention(
        torch.ones_like(ones), ones, torch.ones_like(ones), decay=decay, scale=1.0,
        initial_state=state, output_final_state=True,
    )  # fmt: skip
    assert isinstance(last, Tensor)
    return found[..., 0], last[..., 0, 0]
