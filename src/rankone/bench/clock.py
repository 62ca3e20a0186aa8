"""Milliseconds of calls that take turns.

Rounds go over all calls, so that whatever else the machine does hits all of them alike; a round
times as many repeats of a call as are worth timing, and the median over rounds is what counts. On
the GPU a round is a queue of launches between two events: the time that a caller sees who does not
wait in between. `ms` of a short call is then the time in which the host can launch it; a CUDA graph
of the same call has no such limit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from rankone.provenance import busy_seconds

Call = Callable[[], object]
Key = TypeVar("Key")

_SLOW = 1.0
"""Seconds after which a warm-up on the CPU ends, however few calls it had; calls that take longer
are made once a round."""


@dataclass(frozen=True)
class Timing:
    """What a race found out about one call."""

    ms: float
    """Median over the rounds."""
    fastest_ms: float
    rounds: int
    repeats: int
    """Calls in a round."""
    host_ms: float | None = None
    """Time in which the host launches one call; None on the CPU."""
    graph_ms: float | None = None
    """Median time of the same call as a CUDA graph; None where it cannot be captured."""


@dataclass(frozen=True)
class Effort:
    """How long is measured."""

    rounds: tuple[int, int] = (5, 30)
    """Fewest and most rounds; between them the time decides."""
    seconds: float = 5.0
    """Time for the rounds of one race."""
    warm_up: tuple[int, float] = (3, 0.05)
    """Calls and seconds, both at least, after which a call counts as warm."""
    round_ms: float = 10.0
    """Length of one round of one call on the GPU."""


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device, self.effort = device, effort
        self._gpu = device.type == "cuda"
        self._raced = self._others = 0.0

    @property
    def other_cores(self) -> float | None:
        """Cores that other programs kept busy during the races; None where nobody can tell."""
        if not self._raced or busy_seconds() is None:
            return None
        return round(self._others / self._raced, 2)

    def race(self, calls: Mapping[Key, Call], *, graphs: bool = False) -> dict[Key, Timing]:
        """Times the calls in turn; with `graphs` also as CUDA graphs, where there is a GPU."""
        repeats = {key: self._repeats(call) for key, call in calls.items()}
        times = self._times(calls, repeats)
        return {
            key: Timing(
                ms=statistics.median(found),
                fastest_ms=min(found),
                rounds=len(found),
                repeats=repeats[key],
                host_ms=self._host(calls[key]) if self._gpu else None,
                graph_ms=self._graph(calls[key]) if self._gpu and graphs else None,
            )
            for key, found in times.items()
        }

    def _times(
        self, calls: Mapping[Key, Call], repeats: Mapping[Key, int]
    ) -> dict[Key, list[float]]:
        """Milliseconds of every call in every round."""
        times: dict[Key, list[float]] = {key: [] for key in calls}
        fewest, most = self.effort.rounds
        began, before = time.monotonic(), busy_seconds()
        for done in range(most):
            if done >= fewest and time.monotonic() - began > self.effort.seconds:
                break
            for key, call in calls.items():
                times[key].append(self._round(call, repeats[key]))
        after = busy_seconds()
        self._raced += time.monotonic() - began
        if before is not None and after is not None:
            self._others += max(0.0, after - before)
        return times

    def _repeats(self, call: Call) -> int:
        """Warms the call up; how many repeats make a round."""
        count, seconds = self.effort.warm_up
        began = time.monotonic()
        done = 0
        while done < count or time.monotonic() - began < seconds:
            call()
            self._wait()
            done += 1
            if not self._gpu and time.monotonic() - began > _SLOW:
                break
        if not self._gpu:
            return 1
        return max(1, min(100, round(self.effort.round_ms / max(self._round(call, 3), 1e-3))))

    def _round(self, call: Call, repeats: int) -> float:
        """Milliseconds a call, the mean of some repeats.

        On the CPU a short call is made once before it counts, and then counts as the median of
        three: memory that was free for seconds while another call ran may be gone, and it is not
        the call's work to get it back from whoever lends the machine its memory.
        """
        if not self._gpu:
            found = self._seconds(call)
            if found <= _SLOW:
                found = statistics.median(self._seconds(call) for _ in range(3))
            return 1000 * found
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._wait()
        first.record()
        for _ in range(repeats):
            call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / repeats

    def _seconds(self, call: Call) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def _host(self, call: Call) -> float:
        """Milliseconds until the host has launched a call on an idle GPU, median of ten."""
        found = []
        for _ in range(10):
            self._wait()
            start = time.perf_counter()
            call()
            found.append(1000 * (time.perf_counter() - start))
        self._wait()
        return statistics.median(found)

    def _graph(self, call: Call) -> float | None:
        """The time of the call as a CUDA graph, or None where it cannot be captured."""
        stream = torch.cuda.current_stream()
        try:
            graph = _capture(call)
        except RuntimeError:  # what runs during a capture and must not, or too little memory
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own one behind
            return None
        repeats = self._repeats(graph.replay)
        fewest = max(self.effort.rounds[0], 5)
        return statistics.median(self._round(graph.replay, repeats) for _ in range(fewest))

    def _wait(self) -> None:
        if self._gpu:
            torch.cuda.synchronize(self.device)


def _capture(call: Call) -> torch.cuda.CUDAGraph:
    """The call as a CUDA graph, after it has run on a stream of its own as captures ask for."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def copy_bandwidth(clock: Clock, size: int) -> float:
    """Bytes a second, read and written, of a copy of `size` bytes on the device."""
    source = torch.zeros(size, dtype=torch.uint8, device=clock.device)
    target = torch.ones_like(source)
    timing = clock.race({"copy": lambda: target.copy_(source)})["copy"]
    return 2 * size / (timing.ms / 1000)
