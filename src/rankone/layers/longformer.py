"""Longformer: a window around every token, and a few tokens that see and are seen by all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rankone.layers.base import Compact, Facts, Layer, append
from rankone.ops.sparse_attention import attention, window_attention


class WindowState(NamedTuple):
    """Keys and values of the last tokens, which of them are real, and how many came before."""

    k: Float[Tensor, "B W H K"]
    v: Float[Tensor, "B W H V"]
    mask: Bool[Tensor, "B W"]


class Longformer(Layer):
    """Softmax attention to a window; with global tokens to these too, and of these to all.

    Global tokens have projections of their own, copies of the others at first. Rows of other
    tokens meet them in one softmax with their window. Causal, a window looks back only and there
    are no global tokens, as in the paper's language models.

    Args:
        window: tokens on each side.
        dilation: distance of the tokens in a window; one number, or one a head.
        global_tokens: how many of the first real tokens are global.
        impl: of the windows, see `rankone.ops.sparse_attention.window_attention`.

    Beltagy et al. 2020, section 3.
    """

    name = "longformer"
    facts = Facts(
        title="Longformer",
        paper="Beltagy et al. 2020",
        cost="T",
        state="window · dilation keys and values",
        exact="softmax attention if window >= T",
        causal=True,
        streams=True,
    )

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        window: int = 128,
        dilation: int | Sequence[int] = 1,
        global_tokens: int = 0,
        impl: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(dim, heads, **options)
        dilations = [dilation] * heads if isinstance(dilation, int) else list(dilation)
        if len(dilations) != heads or min(dilations) < 1:
            raise ValueError(
                f"dilation must be a number or one for each of {heads} heads, at least 1, "
                f"got {dilation}"
            )
        if window < 0 or global_tokens < 0:
            raise ValueError(
                f"window and global_tokens must be at least 0, got {window} and {global_tokens}"
            )
        if self.causal and global_tokens:
            raise ValueError("global tokens see the future: they need causal=False")
        self.window, self.dilations, self.global_tokens = window, dilations, global_tokens
        self.impl = impl
        self.global_query: nn.Linear | None = None
        if global_tokens:
            inner, bias = heads * self.head_dim, self.query.bias is not None
            self.global_query, self.global_key, self.global_value = (
                nn.Linear(dim, inner, bias=bias) for _ in range(3)
            )
            self.reset_global()

    @torch.no_grad()
    def reset_global(self) -> None:
        """The global projections become copies of the others."""
        if self.global_query is not None:
            self.global_query.load_state_dict(self.query.state_dict())
            self.global_key.load_state_dict(self.key.state_dict())
            self.global_value.load_state_dict(self.value.state_dict())

    def mix(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The window, and the global tokens if there are any."""
        compact = Compact.of(x, mask)
        if self.global_query is None:
            output = self._windows(*self.project(compact.x), seen=compact.mask)
        else:
            output = self._with_global(compact)
        return compact.restore(output)

    def _windows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seen: Tensor | None,
        shared: tuple[Tensor, Tensor] | None = None,
        shared_seen: Tensor | None = None,
    ) -> Tensor:
        """Heads of one dilation together."""
        options: dict[str, Any] = {"window": self.window, "causal": self.causal, "seen": seen}
        options |= {"shared_seen": shared_seen, "impl": self.impl}
        if len(set(self.dilations)) == 1:
            return window_attention(q, k, v, dilation=self.dilations[0], shared=shared, **options)
        output = torch.empty_like(v)
        for dilation in sorted(set(self.dilations)):
            own = [h for h, other in enumerate(self.dilations) if other == dilation]
            part = None if shared is None else (shared[0][:, :, own], shared[1][:, :, own])
            output[:, :, own] = window_attention(
                q[:, :, own], k[:, :, own], v[:, :, own], dilation=dilation, shared=part, **options
            )
        return output

    def _with_global(self, compact: Compact) -> Tensor:
        x, T = compact.x, compact.x.shape[1]
        few = min(self.global_tokens, T)
        q, k, v = self.project(x)
        mask = compact.mask
        local = torch.arange(T, device=x.device) >= few
        seen = local.expand(x.shape[:2]) if mask is None else mask & local
        output = self._windows(
            q, k, v, seen, (k[:, :few], v[:, :few]), None if mask is None else mask[:, :few]
        )
        assert self.global_query is not None
        q, k, v = (
            self._heads(project(y))
            for project, y in (
                (self.global_query, x[:, :few]), (self.global_key, x), (self.global_value, x),
            )
        )  # fmt: skip
        rows = attention(
            *(y.transpose(1, 2) for y in (q, k, v)),
            seen=None if mask is None else mask[:, None, None],
        )
        return torch.cat([rows.transpose(1, 2), output[:, few:]], dim=1)

    def stream(
        self, x: Tensor, mask: Tensor | None, state: WindowState | None
    ) -> tuple[Tensor, WindowState]:
        """The state is the window of the next token, padding among its tokens."""
        q, k, v = self.project(x)
        T = x.shape[1]
        real = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        if state is not None:
            k, v, real = append([state.k, k]), append([state.v, v]), append([state.mask, real])
            q = append([torch.zeros_like(k[:, : k.shape[1] - T]), q])
        output = self._windows(q, k, v, real)[:, -T:]
        kept = self.window * max(self.dilations)
        first = max(0, k.shape[1] - kept)
        return output, WindowState(k[:, first:], v[:, first:], real[:, first:])
