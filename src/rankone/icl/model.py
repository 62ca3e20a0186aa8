"""The linear transformer of Vladymyrov et al. 2024, section 2.1.

Tokens e_i = (x_i, y_i), i = 1..n, and the query (x, 0). Every token is a query, only the first n
are keys; there is no softmax, no scaling, no normalisation. With P = W_P W_V and Q = W_Kᵀ W_Q,

    e ← e + sum_h P_h (sum_{j<=n} e_j e_jᵀ) Q_h e          in every layer,

and the prediction is minus the last coordinate of the query token. Since each layer maps every
token by the same matrix, a prompt enters only through its Gram matrix G = sum_j e_j e_jᵀ:

    N = I + sum_h P_h G Q_h,   T ← N T,   G ← N G Nᵀ,   implicit weights = -T[d, :d].
"""

from __future__ import annotations

import os
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from rankone.tasks.regression import as_generator

Kind = Literal["full", "diag", "gd++"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""full: P and Q are full matrices. diag: P = diag(p_x I, p_y), Q = diag(q_x I, q_y).
gd++: diag with q_y = 0."""


def parameter_shapes(kind: Kind, layers: int, dim: int, heads: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the trained parameters `p` and `q` of one model."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    for name, value in (("layers", layers), ("dim", dim), ("heads", heads)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if kind == "full":
        square = (layers, heads, dim + 1, dim + 1)
        return {"p": square, "q": square}
    return {"p": (layers, heads, 2), "q": (layers, heads, 2 if kind == "diag" else 1)}


def expand_matrices(
    kind: Kind, p: Float[Tensor, "*shape"], q: Float[Tensor, "*shape2"], dim: int
) -> tuple[Float[Tensor, "*L D D"], Float[Tensor, "*L D D"]]:
    """The matrices P and Q that the parameters of a kind stand for."""
    if kind == "full":
        return p, q
    if kind == "gd++":
        q = torch.cat([q, torch.zeros_like(q)], dim=-1)
    return _diagonal(p, dim), _diagonal(q, dim)


def _diagonal(pair: Tensor, dim: int) -> Tensor:
    x, y = pair[..., :1], pair[..., 1:]
    return torch.diag_embed(torch.cat([x.expand(*x.shape[:-1], dim), y], dim=-1))


class LinearTransformer(nn.Module):
    """A linear transformer for regression prompts; layers are not tied.

    The token forward costs O(n D²) a layer, the Gram forward O(D³) whatever n, with D = dim + 1.

    >>> model = LinearTransformer(kind="diag", layers=2, dim=10)
    >>> sum(parameter.numel() for parameter in model.parameters())
    8
    """

    def __init__(
        self,
        *,
        kind: Kind,
        layers: int,
        dim: int = 10,
        heads: int = 1,
        scale: float = 0.05,
        generator: Generator | int = 0,
    ) -> None:
        super().__init__()
        shapes = parameter_shapes(kind, layers, dim, heads)
        g = as_generator(generator)
        self.kind, self.layers, self.dim, self.heads = kind, layers, dim, heads
        self.p = nn.Parameter(scale * torch.randn(shapes["p"], generator=g))
        self.q = nn.Parameter(scale * torch.randn(shapes["q"], generator=g))

    @classmethod
    def from_parameters(
        cls, kind: Kind, p: Float[Tensor, "*shape"], q: Float[Tensor, "*shape2"], dim: int
    ) -> LinearTransformer:
        """A model whose trained parameters are `p` and `q` (see `parameter_shapes`)."""
        if p.dim() < 2 or not p.is_floating_point() or p.dtype != q.dtype:
            raise ValueError(
                "p and q must be floating-point tensors [L, H, …] of one dtype, "
                f"got {p.dtype} {tuple(p.shape)} and {q.dtype} {tuple(q.shape)}"
            )
        model = cls(kind=kind, layers=p.shape[0], dim=dim, heads=p.shape[1])
        shapes = parameter_shapes(kind, p.shape[0], dim, p.shape[1])
        for name, value in (("p", p), ("q", q)):
            if tuple(value.shape) != shapes[name]:
                raise ValueError(
                    f"{name} of a {kind} model must have shape {shapes[name]}, "
                    f"got {tuple(value.shape)}"
                )
        model.p, model.q = nn.Parameter(p.detach().clone()), nn.Parameter(q.detach().clone())
        return model

    @classmethod
    def from_matrices(
        cls, P: Float[Tensor, "L H D D"], Q: Float[Tensor, "L H D D"]
    ) -> LinearTransformer:
        """A full model with the given matrices."""
        if P.dim() != 4 or P.shape != Q.shape or P.shape[-1] != P.shape[-2] or P.shape[-1] < 2:
            raise ValueError(
                "P and Q must both have shape [L, H, d+1, d+1], "
                f"got {tuple(P.shape)} and {tuple(Q.shape)}"
            )
        return cls.from_parameters("full", P, Q, P.shape[-1] - 1)

    def matrices(self) -> tuple[Float[Tensor, "L H D D"], Float[Tensor, "L H D D"]]:
        """P and Q of every layer and head."""
        return expand_matrices(self.kind, self.p, self.q, self.dim)

    def forward(self, tokens: Float[Tensor, "B T D"]) -> Float[Tensor, " B"]:
        """Predictions for the query, the last token of each prompt."""
        return self.predictions(tokens)[:, -1]

    def predictions(self, tokens: Float[Tensor, "B T D"]) -> Float[Tensor, "B L1"]:
        """Predictions read after 0, 1, …, L layers."""
        if tokens.dim() != 3 or tokens.shape[1] < 2 or tokens.shape[2] != self.dim + 1:
            raise ValueError(
                f"tokens must have shape [B, n+1, d+1] with d+1 = {self.dim + 1} and n >= 1, "
                f"got {tuple(tokens.shape)}"
            )
        self._check_dtype("tokens", tokens)
        P, Q = self.matrices()
        e = tokens
        read = [-e[:, -1, -1]]
        for p, q in zip(P, Q, strict=True):
            keys = e[:, :-1]
            gram = keys.mT @ keys
            e = e + torch.einsum("hij,bjk,hkl,btl->bti", p, gram, q, e)
            read.append(-e[:, -1, -1])
        return torch.stack(read, dim=1)

    def implicit_weights(
        self, gram: Float[Tensor, "B D D"], *, every_layer: bool = False
    ) -> Float[Tensor, "B d"] | Float[Tensor, "B L1 d"]:
        """Weights w with prediction <w, x> for any query x; after every layer if asked.

        `gram` is the sum of e eᵀ over the context tokens, without 1/n.
        """
        D = self.dim + 1
        if gram.dim() != 3 or gram.shape[1:] != (D, D):
            raise ValueError(f"gram must have shape [B, {D}, {D}], got {tuple(gram.shape)}")
        self._check_dtype("gram", gram)
        P, Q = self.matrices()
        eye = torch.eye(D, dtype=gram.dtype, device=gram.device)
        transform = eye.expand_as(gram)
        weights = [-transform[:, -1, :-1]]
        for p, q in zip(P, Q, strict=True):
            n = eye + (p @ gram[:, None] @ q).sum(1)
            transform = n @ transform
            gram = n @ gram @ n.mT
            weights.append(-transform[:, -1, :-1])
        return torch.stack(weights, dim=1) if every_layer else weights[-1]

    def _check_dtype(self, name: str, value: Tensor) -> None:
        if value.dtype != self.p.dtype:
            raise ValueError(
                f"{name} must be of the model's dtype {self.p.dtype}, got {value.dtype}; "
                f"convert one of them, as in model.to({value.dtype})"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the parameters as safetensors, with kind and sizes in the header."""
        from rankone.storage import write_tensors

        tensors = {"p": self.p.detach().cpu(), "q": self.q.detach().cpu()}
        write_tensors(path, tensors, {"kind": self.kind, "dim": str(self.dim)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LinearTransformer:
        """Reads a model that `save` wrote."""
        from rankone.storage import read_tensors

        tensors, metadata = read_tensors(path)
        kind, dim = metadata.get("kind"), metadata.get("dim")
        if kind not in KINDS or dim is None or not {"p", "q"} <= tensors.keys():
            raise ValueError(f"{os.fspath(path)} does not hold a rankone linear transformer")
        return cls.from_parameters(kind, tensors["p"], tensors["q"], int(dim))
