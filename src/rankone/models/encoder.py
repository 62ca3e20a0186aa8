"""An encoder that classifies a sequence, or two of them together, with any mechanism."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rankone.layers import MECHANISMS, Layer, Projections, build

POOLINGS = ("token", "mean", "first", "max")
POSITIONS = ("learned", "sinusoidal", "none")
_TABLES = 0.02
"""Deviation of what tokens and places are embedded as, at first."""


@dataclass(frozen=True)
class EncoderConfig:
    """What an encoder is made of."""

    mechanism: str = "softmax"
    """The token mixer of every block, one of `rankone.layers.MECHANISMS`."""
    vocabulary: int = 256
    """Tokens; 0 is padding."""
    classes: int = 2
    max_length: int = 2048
    """The longest sequence."""
    dim: int = 64
    depth: int = 2
    """Blocks."""
    heads: int = 2
    mlp: int = 128
    """Width of the two-layer network of a block."""
    pooling: str = "mean"
    """What of a sequence is classified: a learned token before it (the arena's way), the mean or
    the largest of its tokens, or the first one."""
    positions: str = "learned"
    """What is added to tokens for their places: learned, sinusoidal or none."""
    dropout: float = 0.0
    pair: bool = False
    """Classify two sequences that are read one by one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the mechanism."""


class Encoder(nn.Module):
    """Embedding, pre-norm blocks x + mix(norm(x)) and x + mlp(norm(x)), pooling, a classifier.

    Layers of one kind differ in their seeds, where the mechanism has one. Linformer's option
    `share="layerwise"` gives all layers one projection.

    Example:
        >>> config = EncoderConfig("linear", vocabulary=16, classes=10, max_length=100)
        >>> model = Encoder(config)
        >>> model(torch.tensor([[3, 7, 9, 0], [4, 4, 0, 0]])).shape
        torch.Size([2, 10])
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        for name, choices in (("pooling", POOLINGS), ("positions", POSITIONS)):
            if getattr(config, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(config, name)!r}"
                )
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim, padding_idx=0)
        self.places: nn.Parameter | None = None
        if config.positions == "learned":
            self.places = nn.Parameter(torch.randn(config.max_length, config.dim))
        with torch.no_grad():  # small, so that they learn fast; as large as each other
            for table in (self.embedding.weight, self.places):
                if table is not None:
                    table.mul_(_TABLES)
        self.summary: nn.Parameter | None = None
        if config.pooling == "token":
            self.summary = nn.Parameter(_TABLES * torch.randn(config.dim))
        mixers = _mixers(config)
        self.blocks = nn.ModuleList(_Block(mixer, config) for mixer in mixers)
        self.norm = nn.LayerNorm(config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.head: nn.Module
        if config.pair:
            self.head = nn.Sequential(
                nn.Linear(4 * config.dim, config.mlp), nn.ReLU(),
                nn.Linear(config.mlp, config.classes),
            )  # fmt: skip
        else:
            self.head = nn.Linear(config.dim, config.classes)

    def forward(
        self, tokens: Int[Tensor, "B *P T"], mask: Bool[Tensor, "B *P T"] | None = None
    ) -> Float[Tensor, "B classes"]:
        """Scores of the classes; of pairs [B, 2, T] too.

        Without a mask tokens that are 0 are padding. A pair (a, b) is classified by
        [a, b, a b, a - b].
        """
        pair = self.config.pair
        if tokens.dim() != 2 + pair or (pair and tokens.shape[1] != 2):
            wanted = "[B, 2, T]" if pair else "[B, T]"
            raise ValueError(f"tokens must have shape {wanted}, got {list(tokens.shape)}")
        mask = tokens != 0 if mask is None else mask
        pooled = self.encode(tokens.flatten(0, -2), mask.flatten(0, -2))
        if self.config.pair:
            a, b = pooled[::2], pooled[1::2]
            pooled = torch.cat([a, b, a * b, a - b], dim=-1)
        scores: Tensor = self.head(pooled)
        return scores

    def encode(self, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B D"]:
        """Sequences as vectors."""
        length = tokens.shape[1]
        if length > self.config.max_length:
            raise ValueError(
                f"sequences may have up to max_length = {self.config.max_length} tokens, "
                f"got {length}"
            )
        x = self.embedding(tokens)
        if self.places is not None:
            x = x + self.places[:length]
        elif self.config.positions == "sinusoidal":
            x = x + _TABLES * sinusoids(length, self.config.dim).to(x)
        if self.summary is not None:
            x = torch.cat([self.summary.expand(len(x), 1, -1), x], dim=1)
            mask = torch.nn.functional.pad(mask, (1, 0), value=True)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, mask)
        return self._pooled(self.norm(x), mask)

    def _pooled(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.config.pooling in ("token", "first"):
            return x[:, 0]
        there = mask[..., None]
        if self.config.pooling == "max":
            largest = x.masked_fill(~there, -torch.inf).amax(1)
            return largest.masked_fill(~there.any(1), 0.0)
        return (x * there).sum(1) / there.sum(1).clamp_min(1)


class _Block(nn.Module):
    """A token mixer and a network for each token, each with its norm before and a way around."""

    def __init__(self, mixer: Layer, config: EncoderConfig) -> None:
        super().__init__()
        self.mixer = mixer
        self.norms = nn.ModuleList(nn.LayerNorm(config.dim) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(config.dim, config.mlp), nn.GELU(), nn.Dropout(config.dropout),
            nn.Linear(config.mlp, config.dim),
        )  # fmt: skip
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.dropout(self.mixer(self.norms[0](x), mask=mask))
        y: Tensor = x + self.dropout(self.mlp(self.norms[1](x)))
        return y


def _mixers(config: EncoderConfig) -> list[Layer]:
    """A layer for each block."""
    options = dict(config.options)
    if config.mechanism == "linformer":
        options.setdefault("max_length", config.max_length + 1)  # with the token before it
        if options.get("share") == "layerwise":
            del options["share"]
            rank, length = options.pop("rank", 64), options.pop("max_length")
            options["projections"] = Projections(rank, length)
    seeded = config.mechanism in MECHANISMS and "seed" in _parameters(config.mechanism)
    first = options.get("seed", 0)
    return [
        build(
            config.mechanism, dim=config.dim, heads=config.heads,
            **options | ({"seed": first + n} if seeded else {}),
        )
        for n in range(config.depth)
    ]  # fmt: skip


def _parameters(mechanism: str) -> Iterable[str]:
    return signature(MECHANISMS[mechanism]).parameters


def sinusoids(length: int, dim: int) -> Float[Tensor, "T D"]:
    """Sines and cosines of places, from wavelengths of 2π to 10,000 · 2π (Vaswani et al. 2017)."""
    place = torch.arange(length)[:, None]
    rate = 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    found = torch.stack([(place * rate).sin(), (place * rate).cos()], dim=-1)
    return found.flatten(1)[:, :dim]
