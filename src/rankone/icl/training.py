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
from rankone.icl.model import Kind
from rankone.storage import read_tensors, write_tensors

SMALLEST_LIMIT = 1.0
"""Least limit on squared errors: the mean loss of an almost exact model is that of its few bad
prompts, so that these have to count."""

SCHEDULES = ("cosine", "constant")

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
    bend: float = 1.5
    """Power of the cosine: above 1 more of the training is spent at small learning rates."""
    full_rates: tuple[float, ...] = (0.5, 1.0)
    """Factors on the learning rate of full models, which the seeds take in turn: some noise
    distributions need slow steps to find a good minimum, some fast ones to reach it."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-12
    clip: float | None = 2.0
    """Gradients longer than this times their running length are shortened (None: never) …"""
    last_clip: float = 10.0
    """… at the end of training longer than this times; in between the factor grows geometrically.
    A clipped mean is biased against rare bad prompts, so clipping has to fade out."""
    limit: float = 20.0
    """Squared errors far above this many times the model's running loss count logarithmically
    (see `loss_and_grad`) …"""
    last_limit: float = 1e4
    """… and at the end of training far above this; in between the limit grows geometrically."""
    spikes: tuple[float, ...] = (1.5, 2.0, 2.5, 3.0)
    """Variances along a random direction of the spiked prompts, which are importance-weighted
    (`NoisyRegression.sample_spiked`): a model can explode on prompts with one large eigenvalue,
    which are too rare for training to meet, yet not for evaluation."""
    share: float = 0.25
    """Part of a batch that is spiked."""
    initial_scale: float = 0.3
    """Standard deviation of the initial P and Q as operators: entries of full matrices are √D
    times smaller."""
    normalise: bool = True
    """Train in normalised coordinates (see `ensemble`)."""
    heats: int = 8
    """Starts of every run; a short training of each decides which one is trained in full."""
    heat_steps: int = 1600
    """Updates of a heat, with a schedule of its own."""
    heat_batch: int = 128
    """Prompts an update of a heat."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "heats", "heat_steps", "heat_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "epsilon", "limit", "last_limit", "initial_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}"
            )
        if not self.full_rates:
            raise ValueError("full_rates must hold at least one factor, got none")

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
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return float(self.learning_rate * rise * cosine**self.bend)

    def factor(self, kind: Kind, seed: int) -> float:
        """A model's factor on the learning rate."""
        return self.full_rates[seed % len(self.full_rates)] if kind == "full" else 1.0

    def clip_at(self, step: int) -> float | None:
        """Clipping factor of a step, counted from 0."""
        if self.clip is None:
            return None
        return float(self.clip * (self.last_clip / self.clip) ** (step / self.steps))

    def limit_at(self, step: int) -> float:
        """Limit of a step, counted from 0, in units of the running loss."""
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
    bend=1.0,
    full_rates=(1.0,),
    limit=math.inf,
    spikes=(),
    share=0.0,
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
    messages: list[str] = field(default_factory=list)
    """What was reported so far: which rows diverged, and when."""
    step: int = 0

    @classmethod
    def fresh(
        cls, ensemble: Ensemble, recipe: Recipe, table: Float[Tensor, "R width"] | None = None
    ) -> State:
        """The state before the first step, from given parameters or random ones."""
        table = ensemble.initial(recipe.initial_scale) if table is None else table
        rates = [recipe.factor(run.kind, run.seed) for run, _ in ensemble.rows]
        zeros = torch.zeros(len(ensemble.rows), device=ensemble.device)
        return cls(
            table=table,
            mean=torch.zeros_like(table),
            square=torch.zeros_like(table),
            good=table.clone(),
            updates=zeros.clone(),
            length=zeros.clone(),
            smooth=zeros + math.log(ensemble.dim / 2),
            rate=torch.tensor(rates, device=ensemble.device),
            broken=zeros > 0,
            restarts=zeros.long(),
        )

    def limit(self, multiple: float) -> Float[Tensor, " R"]:
        """Each row's limit on squared errors: a multiple of its running loss."""
        return (multiple * self.smooth.exp()).clamp_min(SMALLEST_LIMIT)

    def save(self, path: Path, signature: str) -> None:
        """Writes the state atomically; `signature` says what it belongs to."""
        tensors = {
            name: value.cpu() for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        facts = {
            "signature": signature,
            "step": str(self.step),
            "history": json.dumps(self.history),
            "messages": json.dumps(self.messages),
        }
        write_tensors(path, tensors, facts)

    @classmethod
    def load(
        cls, path: Path, signature: str, shape: tuple[int, int], device: torch.device
    ) -> State:
        """Reads a state with a table of this shape; ValueError if it is damaged or belongs to
        another training."""
        tensors, facts = read_tensors(path)
        if facts.get("signature") != signature:
            raise ValueError(
                f"{path} belongs to another configuration; use another folder for this one"
            )
        try:
            history, messages = json.loads(facts["history"]), json.loads(facts["messages"])
            moved = {name: value.to(device) for name, value in tensors.items()}
            state = cls(**moved, history=history, messages=messages, step=int(facts["step"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a training checkpoint: {error}") from None
        for name, value in tensors.items():
            wanted = shape if name in ("table", "mean", "square", "good") else shape[:1]
            if tuple(value.shape) != wanted:
                raise ValueError(
                    f"{path} is not a checkpoint of this training: {name} must have shape "
                    f"{wanted}, got {tuple(value.shape)}"
                )
        return state


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
    A restarted row has half the learning rate and fresh moments; one that diverges before the
    first look after a start has half its parameters too, since these seem to be the reason.
    """
    diverged = state.broken | ~(state.smooth < math.log(dim))
    healthy = ~diverged
    at_once = diverged & (state.updates <= CHECK_EVERY)
    state.good = torch.where(at_once[:, None], state.good / 2, state.good)
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
    prompts = ensemble.batch(8192, -1, recipe.spikes, recipe.share)
    loss, _ = ensemble.loss_and_grad(state.table, prompts, state.limit(recipe.last_limit))
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
        batch = ensemble.batch(recipe.batch, state.step, recipe.spikes, recipe.share)
        limit = state.limit(recipe.limit_at(state.step))
        loss, grad = ensemble.loss_and_grad(state.table, batch, limit)
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
        state.messages += messages
        if progress is not None:
            progress(state.step, messages)
    return state
