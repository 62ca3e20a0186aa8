"""The clock runs what it is given, in turn and often enough. No test asserts a time."""

from __future__ import annotations

import pytest
import torch

from rankone.bench.clock import Clock, Effort, copy_bandwidth

CPU = torch.device("cpu")


def test_calls_take_turns():
    ran: list[str] = []
    clock = Clock(CPU, Effort(rounds=(3, 3), warm_up=(1, 0.0)))
    found = clock.race({name: lambda name=name: ran.append(name) for name in "ab"})
    # Each warmed up first; then in every round once before it counts, and three times.
    assert ran == ["a", "b"] + 3 * (4 * ["a"] + 4 * ["b"])
    assert [found[name].rounds for name in "ab"] == [3, 3]
    assert found["a"].host_ms is None
    assert found["a"].graph_ms is None


def test_a_race_ends_when_its_time_is_up_but_not_before_the_fewest_rounds():
    clock = Clock(CPU, Effort(rounds=(4, 1000), seconds=0.0, warm_up=(1, 0.0)))
    assert clock.race({"a": lambda: None})["a"].rounds == 4


def test_a_call_is_warmed_up_as_often_as_asked():
    ran: list[int] = []
    Clock(CPU, Effort(rounds=(1, 1), warm_up=(7, 0.0))).race({"a": lambda: ran.append(0)})
    assert len(ran) == 7 + 4


def test_slow_calls_are_made_once_a_round(monkeypatch):
    monkeypatch.setattr("rankone.bench.clock._SLOW", -1.0)
    ran: list[int] = []
    clock = Clock(CPU, Effort(rounds=(2, 2), warm_up=(1, 0.0)))
    clock.race({"a": lambda: ran.append(0)})
    assert len(ran) == 1 + 2


def test_nothing_to_time_is_no_error():
    assert Clock(CPU, Effort()).race({}) == {}


def test_the_bandwidth_of_a_copy_is_positive():
    assert copy_bandwidth(Clock(CPU, Effort(rounds=(1, 1))), 2**16) > 0


def test_other_programs_are_counted_during_races_alone(monkeypatch):
    seconds = iter((0.0, 1e9, 0.0))
    monkeypatch.setattr("rankone.bench.clock.busy_seconds", lambda: next(seconds))
    clock = Clock(CPU, Effort(rounds=(1, 1)))
    assert clock.other_cores is None
    clock.race({"a": lambda: None})
    cores = clock.other_cores
    assert cores is not None
    assert cores > 1000


@pytest.mark.gpu
def test_on_a_gpu_the_host_and_graphs_are_timed_too():
    x = torch.ones(1000, device="cuda")
    clock = Clock(torch.device("cuda"), Effort(rounds=(2, 2)))
    found = clock.race({"add": lambda: x + 1}, graphs=True)["add"]
    assert found.graph_ms is not None
    assert found.host_ms is not None


@pytest.mark.gpu
def test_what_cannot_be_captured_has_no_time_as_a_graph():
    x = torch.ones(1000, device="cuda")
    clock = Clock(torch.device("cuda"), Effort(rounds=(2, 2)))
    found = clock.race({"sum": lambda: float(x.sum())}, graphs=True)["sum"]
    assert found.graph_ms is None
    assert float((x + 1).sum()) == 2000.0  # the device still works
