"""The definition: the Gram recursion of many models, differentiated by autograd."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rankone.icl.model import Kind, expand_matrices

EXPLODED = 1e8
"""With a finite limit, a prompt with a larger squared error than this has a loss but no gradient:
float32 would soon overflow, and prompts that explode less say in which direction to go."""


def implicit_weights(
    P: Float[Tensor, "R L H D D"], Q: Float[Tensor, "R L H D D"], gram: Float[Tensor, "R B D D"]
) -> Float[Tensor, "R B d"]:
    """Weights that each model reads off its prompts."""
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    transform = eye
    for layer in range(P.shape[1]):
        p, q = P[:, layer, :, None], Q[:, layer, :, None]  # [R, H, 1, D, D]
        n = eye + (p @ gram[:, None] @ q).sum(1)
        transform = n @ transform
        gram = n @ gram @ n.mT
    return -transform[..., -1, :-1]


def loss_and_grad(
    kind: Kind,
    p: Float[Tensor, "R L H *shape"],
    q: Float[Tensor, "R L H *shape2"],
    gram: Float[Tensor, "S B D D"],
    weights: Float[Tensor, "S B d"],
    stream: Int[Tensor, " R"],
    importance: Float[Tensor, "S B"],
    limit: Float[Tensor, " R"],
) -> tuple[Float[Tensor, " R"], Float[Tensor, "R L H *shape"], Float[Tensor, "R L H *shape2"]]:
    """½ mean ‖w_hat - w‖² (tempered by `limit`) and its gradient."""
    with torch.enable_grad():
        p, q = p.detach().requires_grad_(), q.detach().requires_grad_()
        P, Q = expand_matrices(kind, p, q, weights.shape[-1])
        gram, weights = gram[stream], weights[stream]
        tempered = torch.isfinite(limit)[:, None]
        with torch.no_grad():
            square = (implicit_weights(P, Q, gram) - weights).square().sum(-1)
            exploded = tempered & ~(square <= EXPLODED)
        gram = torch.where(exploded[..., None, None], 0.0, gram)
        square = (implicit_weights(P, Q, gram) - weights).square().sum(-1)
        bound = torch.where(tempered, limit[:, None], 1.0)
        soft = bound * torch.asinh(torch.where(exploded, EXPLODED, square) / bound)
        square = torch.where(tempered, soft, square)
        loss = (importance[stream] * square).mean(-1) / 2
        grad_p, grad_q = torch.autograd.grad(loss.sum(), (p, q))
    return loss.detach(), grad_p, grad_q
