"""What layers share that replace the softmax by an inner product of features."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rankone.layers.base import Layer
from rankone.ops import linear_attention


class FeatureLayer(Layer):
    """o_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j), in time O(T F V) for F features.

    Subclasses write φ. Features of padding are 0.
    """

    def features(self, x: Tensor, *, query: bool) -> Tensor:
        """φ of queries or keys, [B, T, H, K] to [B, T, H, F]."""
        raise NotImplementedError

    def _mapped(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.project(x)
        return self.features(q, query=True), self._keys(k, mask), v

    def _keys(self, k: Tensor, mask: Tensor | None) -> Tensor:
        k = self.features(k, query=False)
        return k if mask is None else k * mask[..., None, None]

    def mix(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """By the operation, causal or not."""
        q, k, v = self._mapped(x, mask)
        output = linear_attention(
            q, k, v.to(q.dtype), scale=1.0, normalize=True, causal=self.causal
        ).output
        return output.to(v.dtype)

    def stream(self, x: Tensor, mask: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        """The state is a `NormalizedState`: the sums of φ(k) vᵀ and of φ(k)."""
        q, k, v = self._mapped(x, mask)
        output, after = linear_attention(
            q, k, v.to(q.dtype), scale=1.0, normalize=True, initial_state=state,
            output_final_state=True,
        )  # fmt: skip
        return output.to(v.dtype), after

    def cross(self, x: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        """The sums of the context, read by the queries of x."""
        q = self.features(self._heads(self.query(x)), query=True)
        k, v = self._keys(self._heads(self.key(context)), mask), self._heads(self.value(context))
        sums = summed(k, v)
        above, below = read(q, sums)
        return (above / (below + 1e-6)).to(v.dtype)


class Sums(NamedTuple):
    """Σ φ(k) vᵀ and Σ φ(k)."""

    kv: Float[Tensor, "B H F V"]
    z: Float[Tensor, "B H F"]


def summed(k: Tensor, v: Tensor) -> Sums:
    """The sums over all tokens, in at least float32."""
    dtype = torch.promote_types(k.dtype, torch.float32)
    k, v = k.to(dtype), v.to(dtype)
    return Sums(torch.einsum("bthf,bthv->bhfv", k, v), k.sum(1))


def read(q: Tensor, sums: Sums) -> tuple[Tensor, Tensor]:
    """φ(q)·Σ φ(k) vᵀ, and φ(q)·Σ φ(k) with one more axis."""
    q = q.to(sums.z.dtype)
    above = torch.einsum("bthf,bhfv->bthv", q, sums.kv)
    return above, torch.einsum("bthf,bhf->bth", q, sums.z)[..., None]
