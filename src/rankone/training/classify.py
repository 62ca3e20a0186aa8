"""The loop that trains a classifier, watches it, and can be continued where it stopped.

    checkpoint.safetensors   weights now and the best so far, what the optimiser keeps, and in its
                             metadata what was seen so far
    model.safetensors        the best weights, once the training is done
    result.json              its accuracies, and how long it took

All randomness comes from the seed and the step: a training that was stopped and continued ends, on
the CPU, with the same bits as one that was not.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rankone.models import Encoder, EncoderConfig
from rankone.progress import Narrator
from rankone.storage import read_json, read_tensors, write_json, write_tensors
from rankone.tasks.long_range import Batch, Examples, Splits
from rankone.training.recipes import Recipe

CHECKPOINT = "checkpoint.safetensors"
SAVED_EVERY = 120.0
"""Seconds between two checkpoints."""


class Outcome(NamedTuple):
    """What a training came to."""

    accuracy: float
    """Of the examples to be judged by, with the weights that were best on those to watch."""
    standard_error: float
    validation: float
    best_step: int
    seconds: float
    parameters: int


class _Seen(NamedTuple):
    """What a training saw so far."""

    step: int
    seconds: float
    best: float
    best_step: int
    history: list[dict[str, float]]


class Training:
    """One model on one task."""

    def __init__(
        self, config: EncoderConfig, recipe: Recipe, splits: Splits, device: torch.device, seed: int
    ) -> None:
        self.recipe, self.splits, self.device, self.seed = recipe, splits, device, seed
        torch.manual_seed(seed)
        self.model = Encoder(config).to(device)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": recipe.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.98))
        self.best = {name: x.clone() for name, x in self.model.state_dict().items()}
        self.seen = _Seen(0, 0.0, 0.0, 0, [])

    def run(self, out: Path, narrator: Narrator, label: str) -> Outcome:
        """To the end, from a checkpoint if there is one."""
        self._restore(out)
        began, saved = time.monotonic() - self.seen.seconds, time.monotonic()
        every = max(1, self.recipe.steps // self.recipe.checks)
        with narrator.stage(label, self.recipe.steps, done=self.seen.step) as advance:
            for step, batch in self._batches():
                loss = self._step(step, batch)
                seen = self.seen._replace(step=step + 1, seconds=time.monotonic() - began)
                if (step + 1) % every == 0 or step + 1 == self.recipe.steps:
                    seen = self._watch(seen, float(loss), narrator, label)
                self.seen = seen
                if time.monotonic() - saved > SAVED_EVERY:
                    self._save(out)
                    saved = time.monotonic()
                advance()
        return self._finish(out)

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        """Those that are still to come."""
        g = torch.Generator().manual_seed(self.seed)
        orders = self.splits.train.orders(self.recipe.batch, g, grouped=self.recipe.grouped)
        numbered = islice(enumerate(orders), self.seen.step, self.recipe.steps)
        for step, which in numbered:
            yield step, self.splits.train.take(which).to(self.device)

    def _step(self, step: int, batch: Batch) -> Tensor:
        """One step of the optimiser; the loss."""
        torch.manual_seed(hash((self.seed, step)))  # dropout
        rate = self.recipe.rate * _height(step, self.recipe)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        loss = nn.functional.cross_entropy(self.model(batch.tokens), batch.labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        return loss.detach()

    def _watch(self, seen: _Seen, loss: float, narrator: Narrator, label: str) -> _Seen:
        accuracy = self.accuracy(self.splits.validation)
        seen.history.append({"step": seen.step, "loss": loss, "accuracy": accuracy})
        if not math.isfinite(loss):
            raise ValueError(
                f"{label}: the loss is not finite at step {seen.step}; try a smaller --rate"
            )
        narrator.say(f"{label}: step {seen.step}, loss {loss:.3f}, accuracy {accuracy:.3f}")
        if accuracy <= seen.best:
            return seen
        self.best = {name: x.clone() for name, x in self.model.state_dict().items()}
        return seen._replace(best=accuracy, best_step=seen.step)

    @torch.no_grad()
    def accuracy(self, examples: Examples) -> float:
        """The share that is answered rightly."""
        self.model.eval()
        right = 0
        for batch in examples.in_order(self.recipe.batch):
            found = self.model(batch.tokens.to(self.device)).argmax(-1).cpu()
            right += int((found == batch.labels).sum())
        return right / len(examples.labels)

    def _finish(self, out: Path) -> Outcome:
        self.model.load_state_dict(self.best)
        accuracy, count = self.accuracy(self.splits.test), len(self.splits.test.labels)
        outcome = Outcome(
            accuracy,
            math.sqrt(accuracy * (1 - accuracy) / count),
            self.seen.best,
            self.seen.best_step,
            round(self.seen.seconds, 1),
            sum(p.numel() for p in self.model.parameters()),
        )
        write_tensors(out / "model.safetensors", self.best)
        history = {"history": self.seen.history, "recipe": asdict(self.recipe)}
        write_json(out / "result.json", outcome._asdict() | history)
        (out / CHECKPOINT).unlink(missing_ok=True)
        return outcome

    def _save(self, out: Path) -> None:
        tensors = {f"model.{name}": x for name, x in self.model.state_dict().items()}
        tensors |= {f"best.{name}": x for name, x in self.best.items()}
        for number, kept in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": x for name, x in kept.items()}
        write_tensors(out / CHECKPOINT, tensors, {"seen": json.dumps(self.seen._asdict())})

    def _restore(self, out: Path) -> None:
        if not (out / CHECKPOINT).exists():
            return
        tensors, facts = read_tensors(out / CHECKPOINT)
        if "seen" not in facts:
            raise ValueError(f"{out / CHECKPOINT} is not of a training; delete it to begin anew")
        parts: dict[str, dict[str, Any]] = {"model": {}, "best": {}, "optimizer": {}}
        for name, x in tensors.items():
            part, rest = name.split(".", 1)
            parts[part][rest] = x
        shapes = {name: x.shape for name, x in self.model.state_dict().items()}
        found = [{n: x.shape for n, x in parts[part].items()} for part in ("model", "best")]
        if found != [shapes, shapes]:
            raise ValueError(f"{out / CHECKPOINT} is of another model; delete it to begin anew")
        self.model.load_state_dict(parts["model"])
        self.best = {name: x.to(self.device) for name, x in parts["best"].items()}
        state = self.optimizer.state_dict()
        state["state"] = {}
        for name, x in parts["optimizer"].items():
            number, field = name.split(".", 1)
            state["state"].setdefault(int(number), {})[field] = x
        self.optimizer.load_state_dict(state)
        self.seen = _Seen(**json.loads(facts["seen"]))


def _height(step: int, recipe: Recipe) -> float:
    """The rate of a step over the largest."""
    rising = (step + 1) / recipe.warm_up
    falling = (recipe.steps - step) / max(1, recipe.steps - recipe.warm_up)
    return min(rising, falling, 1.0)


def read_outcome(folder: Path) -> Outcome | None:
    """That of a training that is done."""
    path = folder / "result.json"
    if not path.exists():
        return None
    found = read_json(path)
    if not isinstance(found, dict) or not found.keys() >= set(Outcome._fields):
        raise ValueError(f"{path} is not the result of a training; delete it to begin anew")
    return Outcome(**{name: found[name] for name in Outcome._fields})
