"""Trains an ensemble: Adam a row, cosine schedule, clipping, and a watch over divergence."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rankone.icl.ensemble import Ensemble
from rankone.storage import read_tensors, write_tensors

CHECK_EVERY = 50
"""Steps between two looks at the losses (a look costs a synchronisation on a GPU)."""


@dataclass(frozen=True)
class Recipe:
    """How models are trained."""

    steps: int = 5000
    """Updates of every model."""
    batch: int = 2048
    """Prompts an update."""
    learning_rate: float = 0.04
    """Peak learning rate of Adam."""
    warmup: float = 0.05
    """Part of the steps in which the learning rate rises from 0."""
    schedule: str = "cosine"
    """"cosine" to 0, or "constant"."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-12
    clip: float | None = 2.0
    """Gradients longer than this times their running length are shortened (None: never) …"""
    last_clip: float = 100.0
    """… at the end of training longer than this times; in between the factor grows geometrically.
    A clipped mean is biased against rare bad prompts, so clipping has to fade out."""
    limit: float = 10.0
    """Squared errors far above this count logarithmically (see `loss_and_grad`) …"""
    last_limit: float = 1e5
    """… and at the end of training far above this; in between the limit grows geometrically."""
    spreads: tuple[float, ...] = (1.0,) * 15 + (1.3,)
    """Variances that the prompts of a batch take in turn (importance-weighted): a deep model can
    explode on large prompts too rare to be met in training, yet not in use."""
    initial_scale: float = 0.3
    """Standard deviation of the initial P and Q as operators: entries of full matrices are √D
    times smaller."""
    normalise: bool = True
    """Train in normalised coordinates (see `ensemble`)."""
    heats: int = 6
    """Starts of every run; a short training of each decides which one is trained in full."""
    heat_steps: int = 800
    """Updates of a heat, with a schedule of its own."""
    heat_batch: int = 256
    """Prompts an update of a heat."""

    def heat(self) -> Recipe:
        """The recipe of a heat."""
        return replace(self, steps=self.heat_steps, batch=self.heat_batch, heats=1)

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        warm = max(1.0, self.warmup * self.steps)
        rise = min(1.0, (step + 1) / warm)
        if self.schedule == "constant":
            return self.learning_rate * rise
        done = max(0.0, (step - warm) / max(1.0, self.steps - warm))
        return self.learning_rate * rise * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def clip_at(self, step: int) -> float | None:
        """Clipping factor of a step, counted from 0."""
        if self.clip is None:
            return None
        return float(self.clip * (self.last_clip / self.clip) ** (step / self.steps))

    def limit_at(self, step: int) -> float:
        """Limit of a step, counted from 0."""
        if math.isinf(self.limit):
            return self.limit
        return float(self.limit * (self.last_limit / self.limit) ** (step / self.steps))


PAPER = Recipe(
    steps=200_000,
    learning_rate=1e-4,
    warmup=0.0,
    schedule="constant",
    beta2=0.999,
    epsilon=1e-8,
    clip=None,
    limit=math.inf,
    spreads=(1.0,),
    initial_scale=0.02,
    normalise=False,
    heats=1,
)
"""The recipe that the paper states: Adam, 1e-4, 200,000 steps of 2,048 prompts. What it does not
state (betas, initialisation, no clipping) is chosen here."""


@dataclass
class State:
    """All that training needs to go on: tensors with a row a run, and the step."""

    table: Float[Tensor, "R width"]
    mean: Float[Tensor, "R width"]
    square: Float[Tensor, "R width"]
    good: Float[Tensor, "R width"]
    """Parameters at the last look at which the row was healthy."""
    updates: Float[Tensor, " R"]
    """Updates since the moments were last cleared."""
    length: Float[Tensor, " R"]
    """Running length of the gradient."""
    smooth: Float[Tensor, " R"]
    """Running mean of log loss."""
    rate: Float[Tensor, " R"]
    """Each row's factor on the learning rate; halved at every restart."""
    broken: Bool[Tensor, " R"]
    """A loss or gradient of this row was not finite since the last look."""
    restarts: Int[Tensor, " R"]
    history: list[list[float]] = field(default_factory=list)
    """Smoothed loss of every row at each look."""
    step: int = 0

    @classmethod
    def fresh(
        cls, ensemble: Ensemble, recipe: Recipe, table: Float[Tensor, "R width"] | None = None
    ) -> State:
        """The state before the first step, from given parameters or random ones."""
        table = ensemble.initial(recipe.initial_scale) if table is None else table
        zeros = torch.zeros(len(ensemble.rows), device=ensemble.device)
        return cls(
            table=table,
            mean=torch.zeros_like(table),
            square=torch.zeros_like(table),
            good=table.clone(),
            updates=zeros.clone(),
            length=zeros.clone(),
            smooth=zeros + math.log(ensemble.dim / 2),
            rate=zeros + 1,
            broken=zeros > 0,
            restarts=zeros.long(),
        )

    def save(self, path: Path, signature: str) -> None:
        """Writes the state atomically; `signature` says what it belongs to."""
        tensors = {
            name: value.cpu() for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        facts = {
            "signature": signature,
            "step": str(self.step),
            "history": json.dumps(self.history),
        }
        write_tensors(path, tensors, facts)

    @classmethod
    def load(cls, path: Path, signature: str, device: torch.device) -> State:
        """Reads a state; ValueError if it is damaged or belongs to another training."""
        tensors, facts = read_tensors(path)
        if facts.get("signature") != signature:
            raise ValueError(
                f"{path} belongs to another configuration; use another folder for this one"
            )
        try:
            history, step = json.loads(facts["history"]), int(facts["step"])
            moved = {name: value.to(device) for name, value in tensors.items()}
            return cls(**moved, history=history, step=step)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a training checkpoint: {error}") from None


def update(
    state: State, recipe: Recipe, loss: Float[Tensor, " R"], grad: Float[Tensor, "R width"]
) -> None:
    """One step of Adam on every row, in place, without looking at values on the host.

    A row whose loss or gradient is not finite keeps its parameters and is marked broken.
    """
    norm = grad.norm(dim=1)
    fine = torch.isfinite(loss) & torch.isfinite(norm)
    state.broken |= ~fine
    grad = torch.where(fine[:, None], grad, 0.0)
    norm = torch.where(fine, norm, 0.0)
    clip = recipe.clip_at(state.step)
    if clip is not None:
        limit = torch.where(state.length > 0, clip * state.length, norm)
        grad = grad * (limit / norm.clamp_min(1e-30)).clamp_max(1.0)[:, None]
        grown = torch.minimum(norm, limit)
        first = state.length == 0
        state.length = torch.where(first, grown, torch.lerp(state.length, grown, 0.05))
    state.updates += 1
    state.mean.lerp_(grad, 1 - recipe.beta1)
    state.square.mul_(recipe.beta2).addcmul_(grad, grad, value=1 - recipe.beta2)
    mean = state.mean / (1 - recipe.beta1**state.updates)[:, None]
    root = (state.square / (1 - recipe.beta2**state.updates)[:, None]).sqrt_()
    change = mean / (root + recipe.epsilon)
    rate = recipe.rate(state.step) * state.rate * fine
    state.table -= rate[:, None] * change
    log_loss = torch.where(fine, loss.clamp_min(1e-30).log(), state.smooth)
    state.smooth = torch.lerp(state.smooth, log_loss, 0.05)


def look(state: State, dim: int) -> list[int]:
    """Restarts the rows that diverged from their last healthy parameters; returns their indices.

    Diverged: something was not finite, or the smoothed loss is above twice that of predicting 0.
    A restarted row has half the learning rate and fresh moments.
    """
    diverged = state.broken | ~(state.smooth < math.log(dim))
    healthy = ~diverged
    state.good = torch.where(healthy[:, None], state.table, state.good)
    state.table = torch.where(healthy[:, None], state.table, state.good)
    state.mean = torch.where(healthy[:, None], state.mean, 0.0)
    state.square = torch.where(healthy[:, None], state.square, 0.0)
    state.updates = torch.where(healthy, state.updates, 0.0)
    state.length = torch.where(healthy, state.length, 0.0)
    state.smooth = torch.where(healthy, state.smooth, math.log(dim / 2))
    state.rate = torch.where(healthy, state.rate, state.rate / 2)
    state.broken = torch.zeros_like(state.broken)
    state.restarts += diverged
    state.history.append(state.smooth.exp().tolist())
    return [int(row) for row in diverged.nonzero().flatten()]


def winners(ensemble: Ensemble, recipe: Recipe, state: State) -> Float[Tensor, "R width"]:
    """The parameters of each run's best start, judged on prompts that training did not see."""
    prompts = ensemble.batch(8192, step=-1, spreads=recipe.spreads)
    loss, _ = ensemble.loss_and_grad(state.table, prompts, recipe.last_limit)
    loss = torch.where(torch.isfinite(loss), loss, math.inf).view(-1, ensemble.starts)
    rows = torch.arange(len(ensemble.runs), device=loss.device) * ensemble.starts + loss.argmin(1)
    return state.table[rows].clone()


def train(
    ensemble: Ensemble,
    recipe: Recipe,
    state: State | None = None,
    *,
    until: int | None = None,
    progress: Callable[[int, list[str]], None] | None = None,
) -> State:
    """Trains to `until` (default: the recipe's last step) from a state, or from the beginning.

    `progress(step, messages)` is called after each step; what it raises ends training between
    two steps, with the state whole.
    """
    state = state or State.fresh(ensemble, recipe)
    until = recipe.steps if until is None else min(until, recipe.steps)
    while state.step < until:
        batch = ensemble.batch(recipe.batch, state.step, recipe.spreads)
        loss, grad = ensemble.loss_and_grad(state.table, batch, recipe.limit_at(state.step))
        update(state, recipe, loss, grad)
        state.step += 1
        messages = []
        if state.step % CHECK_EVERY == 0 or state.step == recipe.steps:
            for row in look(state, ensemble.dim):
                name, rate = ensemble.rows[row].name, float(state.rate[row])
                messages.append(
                    f"{name} diverged before step {state.step}: restarted from its last healthy "
                    f"parameters with {rate:g} of the learning rate"
                )
        if progress is not None:
            progress(state.step, messages)
    return state
