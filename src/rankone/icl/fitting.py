"""A whole training: heats, then the full length, with checkpoints between any two steps."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from rankone.icl.ensemble import Ensemble, Run
from rankone.icl.model import LinearTransformer
from rankone.icl.training import Recipe, State, train, winners
from rankone.tasks.noise import Noise

Progress = Callable[[str, int, int, list[str]], None]
"""Called after every step: stage ("heats" or "training"), step, steps, messages."""


class Fit(NamedTuple):
    """Trained models and how training went."""

    models: dict[Run, LinearTransformer]
    restarts: dict[Run, int]
    history: dict[Run, list[float]]
    """Smoothed loss at every look."""
    messages: list[str]
    """What was reported in all calls, heats and training."""
    seconds: float
    """Time spent in this call."""


def fit(
    runs: list[Run],
    noises: dict[str, Noise],
    recipe: Recipe,
    *,
    dim: int = 10,
    context: int = 20,
    device: str | torch.device = "cpu",
    checkpoints: Path | None = None,
    save_every: float = 60.0,
    progress: Progress | None = None,
    impl: str = "auto",
) -> Fit:
    """Trains all runs. With a folder for checkpoints it goes on where an earlier call stopped.

    The state is saved about every `save_every` seconds and when training is interrupted; the
    final numbers do not depend on where (on the CPU, to the bit).
    """
    began = time.monotonic()
    options: dict[str, Any] = {
        "dim": dim,
        "context": context,
        "device": device,
        "normalise": recipe.normalise,
        "impl": impl,
    }
    ensemble = Ensemble(runs, noises, **options)
    ensemble.compile()
    signature = _signature(ensemble, recipe, noises)
    keeper = _Keeper(checkpoints, signature, ensemble.device, save_every, progress)
    state = keeper.load("training", ensemble)
    if state is None and recipe.heats > 1:
        contest = Ensemble(runs, noises, starts=recipe.heats, **options)
        heats = keeper.run("heats", contest, recipe.heat(), keeper.load("heats", contest))
        state = State.fresh(ensemble, recipe, winners(contest, recipe, heats))
        state.messages = heats.messages
    state = keeper.run("training", ensemble, recipe, state)
    return Fit(
        models=ensemble.models(state.table),
        restarts=dict(zip(ensemble.runs, state.restarts.tolist(), strict=True)),
        history={
            run: [losses[k] for losses in state.history] for k, run in enumerate(ensemble.runs)
        },
        messages=state.messages,
        seconds=time.monotonic() - began,
    )


class _Keeper:
    """Runs the stages of a training and keeps their states on disk."""

    def __init__(
        self,
        folder: Path | None,
        signature: str,
        device: torch.device,
        every: float,
        progress: Progress | None,
    ) -> None:
        self.folder, self.signature, self.device = folder, signature, device
        self.every, self.progress = every, progress

    def _path(self, stage: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{stage}.safetensors"

    def load(self, stage: str, ensemble: Ensemble) -> State | None:
        path = self._path(stage)
        if path is None or not path.exists():
            return None
        shape = (len(ensemble.rows), ensemble.width)
        return State.load(path, self.signature, shape, self.device)

    def run(self, stage: str, ensemble: Ensemble, recipe: Recipe, state: State | None) -> State:
        state = state or State.fresh(ensemble, recipe)
        path = self._path(stage)
        saved = time.monotonic()

        def after_step(step: int, messages: list[str]) -> None:
            nonlocal saved
            asked = stop.asked  # a request that comes later waits for the next step, and its save
            if path is not None and (asked or time.monotonic() - saved > self.every):
                state.save(path, self.signature)
                saved = time.monotonic()
            if self.progress is not None:
                self.progress(stage, step, recipe.steps, messages)
            if asked:
                raise KeyboardInterrupt

        with _StopBetweenSteps() as stop:
            train(ensemble, recipe, state, progress=after_step)
        if path is not None:
            state.save(path, self.signature)
        if stop.asked:
            raise KeyboardInterrupt
        return state


class _StopBetweenSteps:
    """Holds back Ctrl-C and a request to terminate until the step is whole; a second one is
    not held back."""

    asked = False

    def __enter__(self) -> _StopBetweenSteps:
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            for name in (signal.SIGINT, signal.SIGTERM):
                self._before[name] = signal.signal(name, self._ask)
        return self

    def _ask(self, name: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *exception: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)


def _signature(ensemble: Ensemble, recipe: Recipe, noises: dict[str, Noise]) -> str:
    """Names everything that the numbers depend on, so that a checkpoint is never mistaken."""
    facts = {
        "runs": [run.name for run in ensemble.runs],
        "noises": {name: repr(noises[name]) for name in ensemble.noise_names},
        "recipe": asdict(recipe),
        "sizes": [ensemble.dim, ensemble.context, ensemble.heads],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
