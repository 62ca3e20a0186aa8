"""Many models in one table of parameters, a row a model.

Rows of the same kind and depth are neighbours (a group) and are stepped by one kernel call. The
table is padded to the longest row, so that an optimiser is a few operations on a matrix.

Models are trained in normalised coordinates: with S = diag(1, …, 1, c), c² = d + E[sigma²] the
second moment of a label, the tokens S⁻¹ e have entries of order one, and with the Gram matrix
over n so do all parameters; raw omegas span three orders of magnitude. The change is linear and
keeps each kind:  P = S P' S⁻¹ / √n,  Q = S⁻¹ Q' S⁻¹ / √n.
"""

from __future__ import annotations

import math
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from rankone.icl.gradients import choose, loss_and_grad
from rankone.icl.model import Kind, LinearTransformer, parameter_shapes
from rankone.tasks.noise import Noise
from rankone.tasks.regression import NoisyRegression

STARTS = ((1, 0), (1, 1), (0.5, 0.5), (1.5, 0), (2, 0), (2, 2), (1, 2), (0.1, 1))
FULL_STARTS = ((1, 0), (0.1, 1), (2, 0), (0.1, 0.5), (1.5, 0), (0.1, 1.4), (0.5, 0.5), (0.1, 0.75))
"""Starts of a run: how large its random part is, and how far it leans towards gradient descent
(P and -Q a multiple of the identity in all layers), in units of the initial scale."""


class Run(NamedTuple):
    """One model to be trained."""

    kind: Kind
    layers: int
    noise: str
    seed: int

    @property
    def name(self) -> str:
        """A name that is also a file name."""
        kind = self.kind.replace("+", "p")
        return f"{kind}-{self.layers}-{self.noise}-seed{self.seed}"


class Row(NamedTuple):
    """One row of the table: a run from one of its starts."""

    run: Run
    start: int

    @property
    def name(self) -> str:
        """The run's name; further starts are numbered."""
        return self.run.name + (f"-start{self.start}" if self.start else "")


@dataclass(frozen=True)
class Group:
    """The rows of one kind and depth."""

    kind: Kind
    layers: int
    rows: slice
    shapes: dict[str, tuple[int, ...]]
    stream: Int[Tensor, " R"]

    @property
    def lengths(self) -> tuple[int, int]:
        """Numbers in `p` and `q` of one model."""
        return math.prod(self.shapes["p"]), math.prod(self.shapes["q"])


class Batch(NamedTuple):
    """One step's prompts in normalised coordinates, S = noises x seeds streams."""

    gram: Float[Tensor, "S B D D"]
    weights: Float[Tensor, "S B d"]
    importance: Float[Tensor, "S B"]
    scale: Float[Tensor, " S"]
    """Factor from the normalised loss to the loss."""


class Ensemble:
    """Runs, how they lie in the table, and what they read.

    `noises` maps the runs' noise names to distributions. `normalise=False` trains the raw
    parameters, as the paper does. With `starts` > 1 each run has that many rows, which differ in
    their initial parameters only.
    """

    def __init__(
        self,
        runs: list[Run],
        noises: dict[str, Noise],
        *,
        dim: int = 10,
        context: int = 20,
        heads: int = 1,
        starts: int = 1,
        device: torch.device | str = "cpu",
        normalise: bool = True,
        impl: str = "auto",
    ) -> None:
        if not runs:
            raise ValueError("an ensemble needs at least one run, got none")
        unknown = sorted({run.noise for run in runs} - noises.keys())
        if unknown:
            raise ValueError(f"no noise distribution given for {', '.join(unknown)}")
        self.runs = sorted(set(runs), key=lambda run: (run.kind, run.layers, run.noise, run.seed))
        self.rows = [Row(run, start) for run in self.runs for start in range(starts)]
        self.starts = starts
        self.dim, self.context, self.heads = dim, context, heads
        self.device, self.normalise, self.impl = torch.device(device), normalise, impl
        self.noise_names = sorted({run.noise for run in self.runs})
        self.noises = [noises[name] for name in self.noise_names]
        self.seeds = sorted({run.seed for run in self.runs})
        self.task = NoisyRegression(dim=dim, context=context, noise=self.noises[0])
        second_moment = [dim + noise.mean_square if normalise else 1.0 for noise in self.noises]
        self._label_scale = torch.tensor(second_moment, device=self.device).sqrt()
        self.groups = self._make_groups()
        self.stream = torch.cat([group.stream for group in self.groups])
        self._fused_on_cpu = choose(impl, self.device, dim)[0] == "fused_cpu"
        self.width = max(sum(group.lengths) for group in self.groups)

    def _make_groups(self) -> list[Group]:
        groups, first = [], 0
        while first < len(self.rows):
            kind, layers = self.rows[first].run.kind, self.rows[first].run.layers
            rows = [run for run, _ in self.rows if (run.kind, run.layers) == (kind, layers)]
            stream = [
                self.seeds.index(run.seed) * len(self.noises) + self.noise_names.index(run.noise)
                for run in rows
            ]
            shapes = parameter_shapes(kind, layers, self.dim, self.heads)
            place = slice(first, first + len(rows))
            groups.append(
                Group(kind, layers, place, shapes, torch.tensor(stream, device=self.device))
            )
            first = place.stop
        return groups

    def initial(self, scale: float) -> Float[Tensor, "R width"]:
        """Small random parameters; a run's do not depend on the runs beside it.

        Starts of a run differ widely (`STARTS`), since the loss has many local minima.
        """
        table = torch.zeros(len(self.rows), self.width)
        for group in self.groups:
            n_p, n_q = group.lengths
            lean = torch.cat([self._lean(group, "p"), -self._lean(group, "q")])
            for row in range(group.rows.start, group.rows.stop):
                start = self.rows[row].start
                g = Generator().manual_seed(zlib.crc32(self.rows[row].name.encode()))
                noise = torch.randn(n_p + n_q, generator=g)
                if group.kind == "full":
                    noise /= (self.dim + 1) ** 0.5
                starts = FULL_STARTS if group.kind == "full" else STARTS
                random, leaning = starts[start % len(starts)]
                table[row, : n_p + n_q] = scale * (random * noise + leaning * lean)
        return table.to(self.device)

    def _lean(self, group: Group, name: str) -> Float[Tensor, " length"]:
        """The parameters of the identity, in all layers and heads."""
        shape = group.shapes[name]
        if group.kind == "full":
            return torch.eye(self.dim + 1).expand(shape).flatten()
        return torch.ones(shape).flatten()

    def batch(
        self, size: int, step: int, spikes: tuple[float, ...] = (), share: float = 0.0
    ) -> Batch:
        """The prompts of one step: a function of the seeds and the step, nothing else.

        `spikes` and `share` as in `NoisyRegression.sample_spiked`.
        """
        generators = [
            Generator(device=self.device).manual_seed(_mix(seed, step)) for seed in self.seeds
        ]
        c, root = self._label_scale, self.context**0.5
        (gram, target, _), importance = self.task.sample_spiked(
            size,
            self.noises,
            generators,
            spikes=spikes,
            share=share,
            units=(root, c * root) if self.normalise else None,
            impl="fused_cpu" if self._fused_on_cpu else "reference",
        )
        target = target / c[:, None, None]  # all 1 unless normalised
        scale = (self._label_scale**2).repeat(len(self.seeds))
        importance = importance.repeat_interleave(len(self.noises), dim=0)
        return Batch(gram.flatten(0, 1), target.flatten(0, 1), importance, scale)

    def loss_and_grad(
        self,
        table: Float[Tensor, "R width"],
        batch: Batch,
        limit: float | Float[Tensor, " R"] = math.inf,
    ) -> tuple[Float[Tensor, " R"], Float[Tensor, "R width"]]:
        """Loss of every row, and its gradient in the shape of the table.

        `limit` as in `rankone.icl.gradients.loss_and_grad`, on squares that are not normalised.
        """
        # What all groups share is computed once: a training step is many small calls.
        scale = batch.scale[self.stream]
        limits = limit / scale
        losses, grad = [], torch.zeros_like(table)
        for group in self.groups:
            p, q = self.split(table, group)
            result = loss_and_grad(
                group.kind,
                p,
                q,
                batch.gram,
                batch.weights,
                group.stream,
                importance=batch.importance,
                limit=limits[group.rows],
                impl=self.impl,
            )
            losses.append(result.loss)
            n_p, n_q = group.lengths
            grad[group.rows, :n_p] = result.p.flatten(1)
            grad[group.rows, n_p : n_p + n_q] = result.q.flatten(1)
        return torch.cat(losses) * scale, grad

    def compile(self) -> None:
        """Compiles the kernels of all groups side by side; without this they wait for each other.

        Only the GPU's kernels are compiled a depth at a time, and only compiling leaves Python
        free to compile the next.
        """
        if self.device.type != "cuda":
            return
        table, batch = self.initial(0.01), self.batch(8, step=-1)

        def first_call(group: Group) -> None:
            p, q = self.split(table, group)
            prompts = (batch.gram, batch.weights, group.stream)
            loss_and_grad(group.kind, p, q, *prompts, limit=1.0, impl=self.impl)

        deepest_first = sorted(self.groups, key=lambda group: -group.layers)
        with ThreadPoolExecutor() as pool:
            list(pool.map(first_call, deepest_first))

    def split(
        self, table: Float[Tensor, "R width"], group: Group
    ) -> tuple[Float[Tensor, "G L H *shape"], Float[Tensor, "G L H *shape2"]]:
        """The parameters p and q of a group's rows."""
        n_p, n_q = group.lengths
        rows = table[group.rows]
        p = rows[:, :n_p].reshape(-1, *group.shapes["p"])
        q = rows[:, n_p : n_p + n_q].reshape(-1, *group.shapes["q"])
        return p, q

    def raw_parameters(
        self, table: Float[Tensor, "R width"], group: Group
    ) -> tuple[Float[Tensor, "G L H *shape"], Float[Tensor, "G L H *shape2"]]:
        """p and q of a group in the paper's coordinates, in float64."""
        p, q = (part.double() for part in self.split(table, group))
        if not self.normalise:
            return p, q
        noise = group.stream % len(self.noises)
        c = self._label_scale.double()[noise]
        root = self.context**0.5
        ones = torch.ones(len(c), self.dim, dtype=c.dtype, device=c.device)
        s = torch.cat([ones, c[:, None]], dim=1)[:, None, None]  # [R, 1, 1, D]
        if group.kind == "full":
            p = p * s[..., :, None] / s[..., None, :] / root
            return p, q / s[..., :, None] / s[..., None, :] / root
        tail = s[..., -q.shape[-1] - (1 if group.kind == "gd++" else 0) :][..., : q.shape[-1]]
        return p / root, q / tail**2 / root

    def models(self, table: Float[Tensor, "R width"]) -> dict[Run, LinearTransformer]:
        """The trained models, in the paper's coordinates."""
        found = {}
        for group in self.groups:
            p, q = self.raw_parameters(table, group)
            for k, (run, _) in enumerate(self.rows[group.rows]):
                found[run] = LinearTransformer.from_parameters(
                    run.kind, p[k].cpu(), q[k].cpu(), self.dim
                )
        return found


def _mix(seed: int, step: int) -> int:
    """A seed for the prompts of one step, different for every (seed, step)."""
    return zlib.crc32(f"prompts-{seed}-{step}".encode()) + (seed << 32)
