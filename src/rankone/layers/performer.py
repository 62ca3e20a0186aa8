"""Performer: softmax attention in expectation, by positive random features (FAVOR+)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from rankone.layers.base import Facts
from rankone.layers.features import FeatureLayer
from rankone.ops import feature_maps

KERNELS = ("softmax", "relu")


class Performer(FeatureLayer):
    """Attention with E[φ(q)·φ(k)] = e^(q·k / √K), or with φ(x) = relu(W x) + 10⁻³.

    The projection W is drawn once and saved with the weights; `redraw` draws another one. Nothing
    is subtracted from the exponents of keys, so that no token depends on later ones.

    Args:
        features: F, rows of W; 2 K or more approximate well.
        kernel: softmax, or relu (deterministic given W, not an approximation of softmax).
        orthogonal: rows of W are orthogonal, K at a time: less variance.
        seed: of the projection.

    Choromanski et al. 2021, equations 5 to 10 and section 2.4.
    """

    name = "performer"
    facts = Facts(
        title="Performer (FAVOR+)",
        paper="Choromanski et al. 2021",
        cost="T",
        state="F V + F a head",
        exact="softmax attention in expectation; error ~ 1/√F",
        causal=True,
        streams=True,
        cross=True,
    )

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        features: int = 256,
        kernel: str = "softmax",
        orthogonal: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(dim, heads, **options)
        if kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
        if features < 1:
            raise ValueError(f"features must be at least 1, got {features}")
        self.kernel, self.orthogonal = kernel, orthogonal
        self.projection: Tensor
        self.register_buffer("projection", torch.empty(heads, features, self.head_dim))
        self.redraw(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def redraw(self, generator: Generator) -> None:
        """Another projection, of its own for every head."""
        draw = feature_maps.gaussian_projection
        if self.orthogonal:
            draw = feature_maps.orthogonal_projection
        heads, features, dim = self.projection.shape
        drawn = [draw(features, dim, generator=generator) for _ in range(heads)]
        self.projection.copy_(torch.stack(drawn))

    def features(self, x: Tensor, *, query: bool) -> Tensor:
        """Positive features, in at least float32: their range is that of exponentials."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        x, w = x.to(dtype), self.projection.to(dtype)
        if self.kernel == "relu":
            count = self.projection.shape[1]
            found: Tensor = (torch.relu(torch.einsum("bthk,hfk->bthf", x, w)) + 1e-3) / count**0.5
            return found
        return feature_maps.favor(x * self.head_dim**-0.25, w, query=query)
