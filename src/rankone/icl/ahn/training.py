"""Training of the two families, all seeds of an experiment as one batch.

Every seed has prompts and first values of its own: N(0, scale²) for all entries of A and B, in the
coordinates of the paper. It starts several times; all starts are trained on a few prompts by BFGS,
and the best is trained on all of them. What is minimised is the logarithm of the mean loss over
fixed prompts, as in the authors' L-BFGS notebook, but exact in the query and in w. Plain prompts
are a sample as the authors have it; with `spiked` ones the mean is that of all prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from rankone.icl.ahn.layers import CHUNK, Family, Matrices, count_b, residuals, unwhiten, whiten
from rankone.icl.ahn.problem import Problem, Sample
from rankone.icl.ahn.products import one_thread
from rankone.icl.ahn.quasi_newton import Function, minimise
from rankone.icl.ahn.spectrum import degree


@dataclass(frozen=True)
class Recipe:
    """How models are trained."""

    spiked: bool = False
    """Train for the expectation, with importance-weighted prompts (`Problem.sample_grams`)."""
    double: bool = False
    """Compute in float64: errors of four layers and more overflow float32 on spiked prompts."""
    white: bool = False
    """Descend in white coordinates instead of the paper's; first values are drawn there."""
    prompts: int = 20_000
    """Prompts of a seed: the authors' batch."""
    iterations: int = 150
    """Iterations with all prompts, at most."""
    few: int = 2000
    """Prompts of a seed with which all its starts are trained first."""
    few_iterations: int = 400
    """Iterations with few prompts, at most."""
    starts: int = 3
    """First values of a seed, of which the best is trained on."""
    scale: float = 1e-4
    """Standard deviation of the first values."""
    longest: float = 1.0
    """The longest step of all entries together."""
    tolerance: float = 1e-6
    """A model is done when the logarithm of its loss falls by less, three times in succession."""
    every: int = 10
    """Iterations between the points of the history."""

    def __post_init__(self) -> None:
        for name in ("prompts", "iterations", "few", "few_iterations", "starts", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Trained(NamedTuple):
    """Models of one experiment, a row a seed."""

    matrices: Matrices
    training_loss: Float[Tensor, " R"]
    """On the seed's own prompts."""
    starts: Float[Tensor, "R S"]
    """The loss of each start on the first few prompts, where the best one was chosen."""
    few_steps: int
    """Iterations with few prompts."""
    steps: Int[Tensor, " T"]
    """Iterations at which the history was written."""
    history: Matrices
    """A [T, R, L, d, d] and B [T, R, K, d, d]."""


def train(
    problem: Problem,
    family: Family,
    layers: int,
    seeds: list[int],
    recipe: Recipe,
    *,
    progress: Callable[[], object] = lambda: None,
) -> Trained:
    """Trains a model of the family for each seed; `progress` is called after each iteration.

    A seed's result does not depend on the seeds beside it, up to rounding.
    """
    shape = (layers + count_b(family, layers), problem.dim, problem.dim)
    if not seeds:
        raise ValueError("seeds must hold at least one seed")
    spikes = problem.spikes(degree(layers, shape[0] - layers)) if recipe.spiked else ()
    drawn = [_draw(problem, shape, seed, recipe, spikes) for seed in seeds]
    x = torch.cat([first for first, _, _ in drawn]).flatten(1)
    few = Sample(
        *(part.repeat_interleave(recipe.starts, dim=-2) for part in _beside(d[1] for d in drawn))
    )
    every = _beside(d[2] for d in drawn)
    diary = _Diary(recipe.every, progress)
    with one_thread() as count, ThreadPoolExecutor(count) as pool:
        return _descend(problem, x, few, every, layers, recipe, diary, pool)


def _descend(
    problem: Problem,
    x: Tensor,
    few: Sample,
    every: Sample,
    layers: int,
    recipe: Recipe,
    diary: _Diary,
    pool: Executor,
) -> Trained:
    """Few prompts with all starts, then all prompts with the best start of each seed."""
    seeds, dim = len(every.importance), problem.dim
    options: dict[str, Any] = {
        "longest": recipe.longest,
        "tolerance": recipe.tolerance,
        "observe": diary.write,
    }
    state = minimise(
        objective(problem, layers, few, white=recipe.white, pool=pool),
        x,
        iterations=recipe.few_iterations,
        **options,
    )
    value = state.value.view(seeds, recipe.starts)
    rows = value.argmin(1) + torch.arange(seeds) * recipe.starts
    diary.keep(rows)
    state = minimise(
        objective(problem, layers, every, white=recipe.white, pool=pool),
        state.x[rows],
        iterations=recipe.iterations,
        hessian=None if state.hessian is None else state.hessian[rows],
        **options,
    )
    diary.write(diary.last - diary.first, state.x, last=True)
    found = split(state.x, layers, dim), split(torch.stack(diary.x), layers, dim)
    final, history = (unwhiten(part, problem) if recipe.white else part for part in found)
    steps = torch.tensor(diary.steps)
    return Trained(final, state.value.exp(), value.exp(), diary.first, steps, history)


def _draw(
    problem: Problem,
    shape: tuple[int, ...],
    seed: int,
    recipe: Recipe,
    spikes: tuple[float, ...],
) -> tuple[Tensor, Sample, Sample]:
    """First values of all starts of a seed [S, L + K, d, d], few prompts, and its prompts."""
    g = Generator().manual_seed(seed)
    first = torch.randn(recipe.starts, *shape, generator=g, dtype=torch.float64)
    dtype = torch.float64 if recipe.double else torch.float32
    few, every = (
        problem.sample_grams(count, generator=g, dtype=dtype, spikes=spikes)
        for count in (recipe.few, recipe.prompts)
    )
    return recipe.scale * first, few, every


def _beside(samples: Iterable[Sample]) -> Sample:
    """Samples of several seeds as one."""
    grams, importance = zip(*samples, strict=True)
    return Sample(torch.cat(grams, dim=2), torch.cat(importance))


def split(x: Tensor, layers: int, dim: int) -> Matrices:
    """Parameters [*, p] as matrices: first all A, then all B."""
    whole = x.reshape(*x.shape[:-1], -1, dim, dim)
    return Matrices(whole[..., :layers, :, :], whole[..., layers:, :, :])


def objective(
    problem: Problem,
    layers: int,
    sample: Sample,
    *,
    white: bool = False,
    pool: Executor | None = None,
) -> Function:
    """The logarithm of the mean loss over each row's prompts, and its gradient in A and B."""
    runs, prompts = sample.importance.shape
    size = max(1, CHUNK // runs)
    cut = torch.split(sample.grams, size, dim=3), torch.split(sample.importance, size, dim=1)
    parts = [(grams.contiguous(), weight / prompts) for grams, weight in zip(*cut, strict=True)]

    start = problem.start

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        matrices = split(leaf, layers, problem.dim)
        whole = torch.cat(matrices if white else whiten(matrices, problem), dim=1)

        def evaluate(part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            grams, weight = part
            own = whole.detach().to(grams.dtype).requires_grad_()
            squares = residuals(Matrices(own[:, :layers], own[:, layers:]), grams, start).square()
            loss = (squares.sum((0, 1)) * weight).sum(1)
            return loss.detach().double(), torch.autograd.grad(loss.sum(), own)[0].double()

        losses, grads = zip(*(pool.map if pool else map)(evaluate, parts), strict=True)
        total = torch.stack(losses).sum(0)
        (grad,) = torch.autograd.grad(whole, leaf, torch.stack(grads).sum(0))
        return total.log(), grad / total[:, None]

    return function


class _Diary:
    """The parameters now and then."""

    def __init__(self, every: int, progress: Callable[[], object]) -> None:
        self.every, self.progress = every, progress
        self.steps: list[int] = []
        self.x: list[Tensor] = []
        self.first = 0
        self.last = 0

    def write(self, iteration: int, x: Tensor, last: bool = False) -> None:
        """Notes x after so many iterations, and in any case if they are the last."""
        self.last = self.first + iteration
        if iteration and not last:
            self.progress()
        if (last or iteration % self.every == 0) and self.last not in self.steps:
            self.steps.append(self.last)
            self.x.append(x.clone())

    def keep(self, rows: Tensor) -> None:
        """Goes on with some rows only."""
        self.x = [x[rows] for x in self.x]
        self.first = self.last


__all__ = ["Recipe", "Trained", "objective", "split", "train"]
