"""One training step written three ways, with the same models and as many prompts.

token   every prompt as tokens:  S = KᵀK,  B = P S Q,  E ← E + E Bᵀ, loss on the query, autograd
gram    the Gram recursion as batched products, autograd (the reference implementation)
fused   the kernels that training uses, called as training calls them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from rankone.icl.ensemble import Batch, Ensemble, Run
from rankone.icl.gradients.reference import implicit_weights
from rankone.icl.model import Kind, expand_matrices
from rankone.icl.training import Recipe
from rankone.tasks.noise import Categorical, Uniform
from rankone.tasks.regression import NoisyRegression, Prompts

Record = dict[str, Any]
Step = tuple[str, bool]
"""An implementation, and whether its step draws the prompts."""

DIM = 10
NOISES = {"sigma_5": Uniform(0, 5), "set_1_3": Categorical((1, 3))}
INITIAL_SCALE = 0.1
LIMIT = 100.0
"""Of squared errors, about what training starts with."""
TOLERANCE = 1e-4
"""Largest difference that counts as rounding, relative to the largest entry of a member."""
PARITY_BATCH = 256
"""Prompts on which the implementations are compared."""


class ParityError(ValueError):
    """Two implementations disagree, so that their times mean nothing."""


class Contest:
    """One kind and depth: the same models for every implementation."""

    def __init__(
        self,
        kind: Kind,
        layers: int,
        context: int,
        batch: int,
        seeds: int,
        device: torch.device,
        fused: str,
    ) -> None:
        self.kind, self.layers, self.context, self.batch = kind, layers, context, batch
        self.device, self.recipe, self.fused = device, Recipe(), fused
        self.runs = [Run(kind, layers, noise, seed) for noise in NOISES for seed in range(seeds)]
        self.ensembles = {
            name: Ensemble(
                self.runs, dict(NOISES), dim=DIM, context=context, device=device, impl=impl
            )
            for name, impl in (("gram", "reference"), ("fused", fused))
        }
        ensemble = self.ensembles["fused"]
        self.members = len(ensemble.rows)
        self.table = ensemble.initial(INITIAL_SCALE)
        p, q = ensemble.raw_parameters(self.table, ensemble.groups[0])
        self.p, self.q = p.float(), q.float()
        self.tasks = [
            NoisyRegression(dim=DIM, context=context, noise=NOISES[run.noise])
            for run in ensemble.runs
        ]

    def tokens(self, step: int, batch: int | None = None) -> Prompts:
        """Token prompts, [members, batch, …]."""
        drawn = []
        for member, task in enumerate(self.tasks):
            g = Generator(self.device).manual_seed(1000 * step + member)
            drawn.append(task.sample(batch or self.batch, generator=g))
        return Prompts(*map(torch.stack, zip(*drawn, strict=True)))

    def grams(self, step: int, batch: int | None = None) -> Batch:
        """Gram matrices, drawn as in training."""
        spiked = self.recipe.spikes, self.recipe.share
        return self.ensembles["fused"].batch(batch or self.batch, step, *spiked)

    def token_step(self, prompts: Prompts) -> Gradient:
        """Loss and gradient of the plain implementation."""
        return token_step(self.kind, self.p, self.q, prompts)

    def gram_step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss and gradient of the reference implementation, by the untempered loss."""
        return self.ensembles["gram"].loss_and_grad(self.table, batch)

    def fused_step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss and gradient as training computes them."""
        return self.ensembles["fused"].loss_and_grad(self.table, batch, LIMIT)

    def drawing_token_step(self) -> Gradient:
        """The plain step on fresh prompts."""
        return self.token_step(self.tokens(1))

    def drawing_fused_step(self) -> tuple[Tensor, Tensor]:
        """The step of training on fresh prompts."""
        return self.fused_step(self.grams(1))

    def steps(self) -> dict[Step, Callable[[], object]]:
        """What is timed: (implementation, whether prompts are drawn) → a step."""
        tokens, grams = self.tokens(0), self.grams(0)
        return {
            ("token", False): lambda: self.token_step(tokens),
            ("gram", False): lambda: self.gram_step(grams),
            ("fused", False): lambda: self.fused_step(grams),
            ("token", True): self.drawing_token_step,
            ("gram", True): lambda: self.gram_step(self.grams(1)),
            ("fused", True): self.drawing_fused_step,
        }

    def parity(self) -> list[Record]:
        """Holds fused to gram and gram to token, gradients too; raises ParityError."""
        batch = min(self.batch, PARITY_BATCH)
        grams, prompts = self.grams(2, batch), self.tokens(2, batch)
        exact = Batch(*(part.double() for part in grams))
        want_loss, want = self.ensembles["gram"].loss_and_grad(self.table.double(), exact, LIMIT)
        loss, grad = self.fused_step(grams)
        token = self.token_step(prompts)
        gram = gram_query_step(self.kind, self.p, self.q, prompts)
        length = sum(self.ensembles["fused"].groups[0].lengths)
        return [
            self._compare("loss, fused and reference", loss, want_loss),
            self._compare("gradient, fused and reference", grad[:, :length], want[:, :length]),
            self._compare("predictions, gram and token", gram.prediction, token.prediction),
            self._compare("gradient for p, gram and token", gram.p, token.p),
            self._compare("gradient for q, gram and token", gram.q, token.q),
        ]

    def _compare(self, check: str, got: Tensor, want: Tensor) -> Record:
        got, want = (part.double().reshape(self.members, -1) for part in (got, want))
        error = float(((got - want).abs().amax(1) / want.abs().amax(1)).max())
        if not error <= TOLERANCE:
            raise ParityError(
                f"{check} differ by {error:.1e} for {self.kind} with {self.layers} layers, where "
                f"{TOLERANCE:.0e} is allowed: no time is reported"
            )
        return {
            "measure": "parity",
            "kind": self.kind,
            "layers": self.layers,
            "check": check,
            "error": error,
            "tolerance": TOLERANCE,
        }


class Gradient(NamedTuple):
    """Predictions for the queries, and the gradient of the mean loss of every member."""

    prediction: Float[Tensor, "R B"]
    p: Tensor
    q: Tensor


def token_step(kind: Kind, p: Tensor, q: Tensor, prompts: Prompts) -> Gradient:
    """The plain step: tokens through the layers, ½ (prediction - target)², autograd."""

    def predict(P: Tensor, Q: Tensor) -> Tensor:
        e = prompts.tokens
        for layer in range(P.shape[1]):
            keys = e[..., :-1, :]
            update = P[:, layer] @ (keys.mT @ keys) @ Q[:, layer]  # one head: [R, 1, D, D]
            e = e + e @ update.mT
        return -e[..., -1, -1]

    return _query_gradient(kind, p, q, prompts, predict)


def gram_query_step(kind: Kind, p: Tensor, q: Tensor, prompts: Prompts) -> Gradient:
    """The same loss from the prompts' Gram matrices, in float64."""
    keys = prompts.tokens[..., :-1, :].double()
    query = prompts.tokens[..., -1, :-1].double()

    def predict(P: Tensor, Q: Tensor) -> Tensor:
        return (implicit_weights(P, Q, keys.mT @ keys) * query).sum(-1)

    return _query_gradient(kind, p.double(), q.double(), prompts, predict)


def _query_gradient(
    kind: Kind, p: Tensor, q: Tensor, prompts: Prompts, predict: Callable[[Tensor, Tensor], Tensor]
) -> Gradient:
    p, q = p.detach().requires_grad_(), q.detach().requires_grad_()
    prediction = predict(*expand_matrices(kind, p, q, DIM))
    loss = (prediction - prompts.target).square().mean(-1).sum() / 2
    grad_p, grad_q = torch.autograd.grad(loss, (p, q))
    return Gradient(prediction.detach(), grad_p, grad_q)
