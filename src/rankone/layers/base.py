"""What all layers have in common: one call, projections, masks, and what a mechanism can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


class Facts(NamedTuple):
    """What a mechanism can do, as `rankone mechanisms` shows it."""

    title: str
    paper: str
    cost: str
    """Of a sequence of T tokens."""
    state: str
    """What streaming carries from token to token, - where there is no streaming."""
    exact: str
    """What it computes exactly, or when it is softmax attention."""
    bidirectional: bool = True
    causal: bool = False
    streams: bool = False
    """Causal layers only: whether a sequence can be given in parts."""
    cross: bool = False
    """Whether keys and values can come from another sequence."""


class Layer(nn.Module):
    """A token mixer with one call, whatever its mechanism.

        y = layer(x)                                         # [B, T, D] to [B, T, D]
        y = layer(x, mask=mask)                              # True marks a real token
        y, state = layer(x, state=state, return_state=True)  # causal: a sequence in parts
        y = layer(x, context=other)                          # keys and values of another sequence

    Padding never changes the outputs of real tokens; outputs of padding are 0.

    Args:
        dim: D.
        heads: H, which divides D unless `head_dim` is given.
        causal: a token sees itself and what is before it.
        head_dim: keys and values of a head, D / H by default.
        bias: of the four projections.
    """

    facts: ClassVar[Facts]
    name: ClassVar[str]

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = False,
        head_dim: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if dim < 1 or heads < 1:
            raise ValueError(f"dim and heads must be at least 1, got {dim} and {heads}")
        if head_dim is None and dim % heads:
            raise ValueError(f"heads must divide dim = {dim} or head_dim be given, got {heads}")
        self._can("causal" if causal else "bidirectional")
        self.dim, self.heads, self.causal = dim, heads, causal
        self.head_dim = dim // heads if head_dim is None else head_dim
        inner = heads * self.head_dim
        self.query, self.key, self.value = (nn.Linear(dim, inner, bias=bias) for _ in range(3))
        self.out = nn.Linear(inner, dim, bias=bias)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        mask: Bool[Tensor, "B T"] | None = None,
        state: Any = None,
        return_state: bool = False,
        context: Float[Tensor, "B S D"] | None = None,
        context_mask: Bool[Tensor, "B S"] | None = None,
    ) -> Any:
        """The layer's output, with `return_state` also the state behind the last token."""
        self._check(x, mask, context, context_mask)
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0.0)  # whatever padding holds
        if context is not None:
            self._can("cross")
            if self.causal or state is not None or return_state:
                raise ValueError("context needs a layer that is not causal, and no state")
            if context_mask is not None:
                context = context.masked_fill(~context_mask[..., None], 0.0)
            return self._outputs(self.cross(x, context, context_mask), mask)
        if state is None and not return_state:
            return self._outputs(self.mix(x, mask), mask)
        self._can("streams")
        if not self.causal:
            raise ValueError(f"a state needs a causal layer: build({self.name!r}, …, causal=True)")
        heads, after = self.stream(x, mask, state)
        y = self._outputs(heads, mask)
        return (y, after) if return_state else y

    # What a mechanism writes.

    def mix(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[B, T, D] to the heads' outputs [B, T, H, V], anything finite for padding."""
        raise NotImplementedError

    def stream(self, x: Tensor, mask: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        """`mix` of what comes after a state, None at the beginning, and the state behind it."""
        raise NotImplementedError

    def cross(self, x: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of x to the context, [B, T, H, V]."""
        raise NotImplementedError

    # What it writes it with.

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, T, H, K] each."""
        return self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))

    def _heads(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (self.heads, self.head_dim))

    def _outputs(self, heads: Tensor, mask: Tensor | None) -> Tensor:
        y: Tensor = self.out(heads.flatten(-2))
        return y if mask is None else y * mask[..., None]

    def _check(
        self, x: Tensor, mask: Tensor | None, context: Tensor | None, context_mask: Tensor | None
    ) -> None:
        for name, y in (("x", x), ("context", context)):
            if y is not None and (y.dim() != 3 or y.shape[2] != self.dim or y.shape[1] < 1):
                raise ValueError(
                    f"{name} must have shape [B, T, D] with T >= 1 and D = {self.dim}, "
                    f"got {tuple(y.shape)}"
                )
        if context is not None and context.shape[0] != x.shape[0]:
            raise ValueError(
                f"context must have the batch of x, {x.shape[0]}, got {context.shape[0]}"
            )
        if context is None and context_mask is not None:
            raise ValueError("context_mask needs a context")
        for name, m, y in (("mask", mask, x), ("context_mask", context_mask, context)):
            if m is not None and y is not None:
                if m.shape != y.shape[:2]:
                    raise ValueError(
                        f"{name} must have shape [B, T] = {tuple(y.shape[:2])}, "
                        f"got {tuple(m.shape)}"
                    )
                if m.dtype != torch.bool:
                    raise ValueError(f"{name} must be bool, True for real tokens, got {m.dtype}")

    @classmethod
    def _can(cls, what: str) -> None:
        """Raises ValueError for what the mathematics does not allow."""
        if not getattr(cls.facts, what):
            raise ValueError(cls._refusal(what))

    @classmethod
    def _refusal(cls, what: str) -> str:
        from rankone.layers import MECHANISMS

        able = [name for name, other in MECHANISMS.items() if getattr(other.facts, what)]
        return f"{cls.name} {_CANNOT[what]}; these can: {', '.join(able)}"

    def extra_repr(self) -> str:
        """What the module shows of itself."""
        return f"{self.dim}, heads={self.heads}, causal={self.causal}"


_CANNOT = {
    "bidirectional": "is causal only",
    "causal": "cannot be causal, since every output depends on all tokens",
    "streams": "has no state that a sequence could be continued from",
    "cross": "is not defined for keys and values of another sequence",
}


class Compact(NamedTuple):
    """Sequences with their padding moved to the end."""

    x: Float[Tensor, "B T D"]
    lengths: Tensor | None
    """[B]: real tokens; None if all are."""
    order: Tensor | None
    """[B, T]: where each token came from."""

    @classmethod
    def of(cls, x: Tensor, mask: Tensor | None) -> Compact:
        """The real tokens of all sequences, in order, first."""
        if mask is None:
            return cls(x, None, None)
        order = (~mask).to(torch.int8).argsort(dim=1, stable=True)
        compact = x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))
        return cls(compact, mask.sum(1), order)

    @property
    def mask(self) -> Tensor | None:
        """[B, T]: True for real tokens, which come first."""
        if self.lengths is None:
            return None
        return torch.arange(self.x.shape[1], device=self.x.device) < self.lengths[:, None]

    def restore(self, y: Tensor) -> Tensor:
        """Outputs where their tokens were."""
        if self.order is None:
            return y
        order = self.order.view(*self.order.shape, *[1] * (y.dim() - 2))
        return torch.empty_like(y).scatter(1, order.expand_as(y), y)


def append(parts: Sequence[Tensor | None], dim: int = 1) -> Tensor:
    """The tensors that are there, one after another."""
    there = [x for x in parts if x is not None]
    return there[0] if len(there) == 1 else torch.cat(there, dim=dim)
