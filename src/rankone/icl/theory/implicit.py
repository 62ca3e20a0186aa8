"""The linear model that every layer keeps (Vladymyrov et al. 2024, section 4).

Behind every layer there are M, u, a and w, the same for all tokens, with

    x_i = M x_i⁰ + y_i⁰ u,    y_i = a y_i⁰ - <w, x_i⁰>,    the query: x = M x⁰, y = -<w, x⁰>

(Theorem 4.1), so that the prediction is <w, x⁰> and w is what the prompt was made into.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rankone.icl.model import LinearTransformer


class ImplicitModel(NamedTuple):
    """M, u, a and w behind 0, 1, …, L layers."""

    M: Float[Tensor, "B L1 d d"]
    """What features have been multiplied by."""
    u: Float[Tensor, "B L1 d"]
    """How much of its label a token has in its features."""
    a: Float[Tensor, "B L1"]
    """How much of its label is left."""
    w: Float[Tensor, "B L1 d"]
    """The implicit weights."""


def implicit_models(model: LinearTransformer, gram: Float[Tensor, "B D D"]) -> ImplicitModel:
    """The linear model behind every layer, by the recursion of Lemma 4.3.

    With [[A, b], [cᵀ, d]] = Σ_h P_h G Q_h, G the Gram matrix of the tokens in that layer,

        M ← (I + A) M - b wᵀ      u ← (I + A) u + a b
        a ← (1 + d) a + <c, u>    w ← (1 + d) w - Mᵀ c

    from M = I, u = 0, a = 1, w = 0, all on the right being those before the layer. The signs are
    those that the forward pass has; some printed versions have others.

    >>> model = LinearTransformer(kind="full", layers=2, dim=3).double()
    >>> gram = torch.eye(4, dtype=torch.float64)[None]
    >>> found = implicit_models(model, gram)
    >>> bool(torch.allclose(found.w, model.implicit_weights(gram, every_layer=True)))
    True
    """
    _check_gram(model, gram)
    d, B = model.dim, gram.shape[0]
    M = torch.eye(d, dtype=gram.dtype, device=gram.device).expand(B, d, d)
    u, w = gram.new_zeros(B, d), gram.new_zeros(B, d)
    a = gram.new_ones(B)
    layers = [ImplicitModel(M, u, a, w)]
    for block in _blocks(model, gram):
        A, b, c, rest = block[:, :d, :d], block[:, :d, d], block[:, d, :d], block[:, d, d]
        M, u, a, w = (
            M + A @ M - _outer(b, w),
            u + _times(A, u) + a[:, None] * b,
            a + rest * a + (c * u).sum(1),
            w + rest[:, None] * w - _times(M.mT, c),
        )
        layers.append(ImplicitModel(M, u, a, w))
    return ImplicitModel(*(torch.stack(parts, dim=1) for parts in zip(*layers, strict=True)))


def _blocks(model: LinearTransformer, gram: Tensor) -> list[Tensor]:
    """Σ_h P_h G Q_h of every layer, G the Gram matrix of its tokens."""
    P, Q = model.matrices()
    found = []
    for p, q in zip(P, Q, strict=True):
        block = (p @ gram[:, None] @ q).sum(1)
        found.append(block)
        step = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device) + block
        gram = step @ gram @ step.mT
    return found


class Momentum(NamedTuple):
    """The step of a DIAG layer as descent with momentum; of all layers, [B, L, …].

    With g = Σ (a w* - w), half the downward gradient of sum_i (a y_i - <w, x_i>)²,

        u ← (I - Λ) u + Γ g          w ← (1 + s) w - Π g - Φ u
    """

    Lambda: Float[Tensor, "B L d d"]
    Gamma: Float[Tensor, "B L d d"]
    s: Float[Tensor, "B L"]
    Pi: Float[Tensor, "B L d d"]
    Phi: Float[Tensor, "B L d d"]
    gradient: Float[Tensor, "B L d"]


def momentum_form(model: LinearTransformer, gram: Float[Tensor, "B D D"]) -> Momentum:
    """Lemma 4.4 for DIAG and GD++ models of one or more heads.

    With the omegas w_xx = Σ_h p_x q_x and so on, w* least squares, rho its sum of squared
    residuals, and S = Σˡ, lambda the sums of squares of the tokens in the layer,

        Λ = -w_xy a² rho I - w_xx S       Γ = a w_xy (M + u w*ᵀ)     s = w_yy lambda
        Π = w_yx Mᵀ (M + u w*ᵀ)           Φ = a rho w_yx Mᵀ

    (the published Γ and Π have one more a). It needs more examples than dimensions.

    Raises ValueError for FULL models and for prompts without a least squares solution.
    """
    if model.kind == "full":
        raise ValueError("the momentum form is that of diag and gd++ models, got a full one")
    _check_gram(model, gram)
    d = model.dim
    omega = omegas(model)
    sums, moment, square = gram[:, :d, :d], gram[:, :d, d], gram[:, d, d]
    best, info = torch.linalg.solve_ex(sums, moment)
    if bool(info.any()):
        raise ValueError(
            "every prompt must have least squares weights: more examples than features"
        )
    rho = square - (best * moment).sum(1)
    layers = implicit_models(model, gram)
    eye = torch.eye(d, dtype=gram.dtype, device=gram.device)
    steps = []
    for n, (xx, xy, yx, yy) in enumerate(omega):
        M, u, a, w = (part[:, n] for part in layers)
        tokens = _tokens_gram(M, u, a, w, gram)
        mixed = M + _outer(u, best)
        left = a * rho
        steps.append(
            Momentum(
                -xy * (a * left)[:, None, None] * eye - xx * tokens[:, :d, :d],
                xy * a[:, None, None] * mixed,
                yy * tokens[:, d, d],
                yx * M.mT @ mixed,
                yx * left[:, None, None] * M.mT,
                _times(sums, a[:, None] * best - w),
            )
        )
    return Momentum(*(torch.stack(parts, dim=1) for parts in zip(*steps, strict=True)))


def momentum_step(
    form: Momentum, layer: int, u: Float[Tensor, "B d"], w: Float[Tensor, "B d"]
) -> tuple[Float[Tensor, "B d"], Float[Tensor, "B d"]]:
    """u and w behind a layer, from those before it."""
    fade, push, s, pull, carry, g = (part[:, layer] for part in form)
    after_u = u - _times(fade, u) + _times(push, g)
    after_w = (1 + s)[:, None] * w - _times(pull, g) - _times(carry, u)
    return after_u, after_w


def omegas(model: LinearTransformer) -> Float[Tensor, "L four"]:
    """w_xx, w_xy, w_yx and w_yy of every layer: what the heads of a DIAG model add up to.

        x ← x + w_xx S x + w_xy y alpha      y ← y + w_yx <alpha, x> + w_yy lambda y

    >>> model = LinearTransformer.from_parameters(
    ...     "diag", torch.tensor([[[2.0, 3.0]]]), torch.tensor([[[5.0, 7.0]]]), dim=4
    ... )
    >>> omegas(model)
    tensor([[10., 14., 15., 21.]], grad_fn=<ViewBackward0>)
    """
    if model.kind == "full":
        raise ValueError("full models have matrices, not omegas; explain them by their layers")
    q = model.q if model.kind == "diag" else torch.nn.functional.pad(model.q, (0, 1))
    return torch.einsum("lhi,lhj->lij", model.p, q).flatten(1)


def _tokens_gram(M: Tensor, u: Tensor, a: Tensor, w: Tensor, gram: Tensor) -> Tensor:
    """The Gram matrix of the tokens in a layer."""
    above = torch.cat([M, u[:, :, None]], dim=2)
    below = torch.cat([-w, a[:, None]], dim=1)[:, None]
    transform = torch.cat([above, below], dim=1)
    return transform @ gram @ transform.mT


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x[:, :, None] * y[:, None, :]


def _times(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix @ x[:, :, None])[:, :, 0]


def _check_gram(model: LinearTransformer, gram: Tensor) -> None:
    D = model.dim + 1
    if gram.dim() != 3 or gram.shape[1:] != (D, D) or gram.shape[0] < 1:
        raise ValueError(f"gram must have shape [B, {D}, {D}] with B >= 1, got {tuple(gram.shape)}")
    if gram.dtype != model.p.dtype:
        raise ValueError(f"gram must be of the model's dtype {model.p.dtype}, got {gram.dtype}")
