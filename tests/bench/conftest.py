"""The benchmark in a tiny size, and no other library where a test does not ask for one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.tiny import TINY
from rankone.bench import memory, ops, peers


@pytest.fixture(autouse=True)
def _no_peers(monkeypatch):
    monkeypatch.setattr(memory, "_PRELOADED", ["rankone.bench.memory"])
    monkeypatch.setattr(peers, "installed_version", lambda package: None)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The benchmark on the tiny plan; options replace parts of the plan or go to `bench`.

    Memory is not measured, nothing is drawn, and nobody asks what else the machine does.
    """
    monkeypatch.setattr("rankone.bench.clock.busy_seconds", lambda: None)
    monkeypatch.setattr("rankone.bench.measure.peak_gib", lambda *_: 0.25)
    monkeypatch.setattr("rankone.bench.plots.plot", lambda result: b"a plot")

    def run_it(**options: Any) -> Any:
        changes = {name: options.pop(name) for name in list(options) if hasattr(TINY, name)}
        options = {"out": tmp_path / "ops.json", "device": "cpu"} | options
        return ops.bench(plan=replace(TINY, **changes), **options)

    return run_it
