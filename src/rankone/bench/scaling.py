"""How time and memory of every mechanism grow with the sequence: `rankone bench scaling`.

Layers of one width, one sequence, longer and longer: the forward pass, and a training step (forward
and backward to the input and all weights). Every layer is compared with itself in float64 before it
is timed. The file is written after every length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankone import provenance
from rankone.allocation import keep_memory
from rankone.bench.clock import Clock, Effort
from rankone.bench.memory import apart, growth
from rankone.bench.summary import slope
from rankone.devices import pick_device
from rankone.layers import MECHANISMS, Layer, build
from rankone.progress import Narrator
from rankone.storage import read_json, write_json

Record = dict[str, Any]
PASSES = ("forward", "training_step")

OPTIONS: dict[str, dict[str, Any]] = {
    "performer": {"features": 128},
    "rfa": {"features": 64},
    "linformer": {"rank": 128},
    "nystromformer": {"landmarks": 64},
    "longformer": {"window": 128},
    "bigbird": {"block": 64},
    "long_short": {"window": 128},
}
"""What mechanisms are built with; others have no options."""

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Relative errors beside float64 up to which a layer is timed."""


class Key(NamedTuple):
    """One line of the picture."""

    mechanism: str
    causal: bool

    def __str__(self) -> str:
        return f"{self.mechanism}{', causal' if self.causal else ''}"


@dataclass(frozen=True)
class Plan:
    """One kind of run."""

    lengths: tuple[int, ...]
    dtype: torch.dtype
    dim: int = 256
    heads: int = 4
    pass_seconds: float = 20.0
    """A layer is left out where one pass is expected to take longer than this."""
    compared: int = 512
    """Length at which a layer is compared with itself in float64."""
    fit_from: int = 1024
    effort: Effort = field(
        default_factory=lambda: Effort(rounds=(3, 15), seconds=3.0, warm_up=(1, 0.02))
    )


CPU = Plan(tuple(2**n for n in range(10, 17)), torch.float32)
GPU = Plan(tuple(2**n for n in range(10, 21)), torch.bfloat16, dim=512, heads=8, pass_seconds=10.0)
QUICK = Plan((256, 512, 1024), torch.float32, dim=64, heads=2, compared=100, fit_from=256,
             effort=Effort(rounds=(2, 2), seconds=0.1, warm_up=(1, 0.0)))  # fmt: skip


def lines() -> list[Key]:
    """All mechanisms, both ways where they have both."""
    found = []
    for name, mechanism in MECHANISMS.items():
        found.append(Key(name, False))
        if mechanism.facts.causal:
            found.append(Key(name, True))
    return found


def make(key: Key, plan: Plan, length: int, device: torch.device, dtype: torch.dtype) -> Layer:
    """A layer for sequences of a length, with weights from a seed."""
    options = dict(OPTIONS.get(key.mechanism, {}))
    if key.mechanism == "linformer":
        options["max_length"] = length
    if key == Key("long_short", True):
        options["chunk"] = 64
    torch.manual_seed(0)
    layer = build(key.mechanism, dim=plan.dim, heads=plan.heads, causal=key.causal, **options)
    return layer.to(device, dtype)


def draw(plan: Plan, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """One sequence."""
    g = torch.Generator().manual_seed(length)
    return torch.randn(1, length, plan.dim, generator=g).to(device, dtype)


def passes(layer: Layer, x: Tensor) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    weights = [p for p in layer.parameters() if p.requires_grad]

    def forward() -> Tensor:
        with torch.no_grad():
            y: Tensor = layer(x)
        return y

    def training_step() -> object:
        given = x.detach().requires_grad_()
        return torch.autograd.grad(layer(given).sum(), [given, *weights], allow_unused=True)

    return {"forward": forward, "training_step": training_step}


class Measurement:
    """All lines of a plan on one device."""

    def __init__(self, plan: Plan, device: torch.device, records: list[Record]) -> None:
        self.plan, self.device, self.records = plan, device, records
        self.left_out: list[Record] = []
        self.errors: dict[Key, float] = {}
        self.clock = Clock(device, plan.effort)

    def compare(self) -> None:
        """Every layer with itself in float64; ValueError if one is wrong."""
        for key in lines():
            args = (key, self.plan, self.plan.compared)
            x = draw(self.plan, self.plan.compared, torch.device("cpu"), torch.float64)
            with torch.no_grad():
                want = make(*args, torch.device("cpu"), torch.float64)(x)
                layer = make(*args, self.device, self.plan.dtype)
                got = layer(x.to(self.device, self.plan.dtype)).cpu().double()
            error = float((got - want).norm() / want.norm())
            if not error <= LIMITS[self.plan.dtype]:
                raise ValueError(
                    f"{key} is wrong by {error:.2g} in {self.plan.dtype}: nothing is timed"
                )
            self.errors[key] = error

    def length(self, length: int) -> None:
        """Both passes of all lines at a length."""
        for name in PASSES:
            keys = [key for key in lines() if self._is_missing(key, length, name)]
            layers = {
                key: make(key, self.plan, length, self.device, self.plan.dtype) for key in keys
            }
            x = draw(self.plan, length, self.device, self.plan.dtype)
            calls = {key: passes(layer, x)[name] for key, layer in layers.items()}
            calls = {
                key: call for key, call in calls.items() if self._runs(key, length, name, call)
            }
            if not calls:
                continue
            for key, timing in self.clock.race(calls).items():
                self.records.append(
                    {
                        "mechanism": key.mechanism,
                        "causal": key.causal,
                        "pass": name,
                        "dtype": str(self.plan.dtype).removeprefix("torch."),
                        "device": self.device.type,
                        "B": 1,
                        "T": length,
                        "D": self.plan.dim,
                        "H": self.plan.heads,
                        "ms": float(f"{timing.ms:.5g}"),
                        "peak_gib": self._peak(key, length, name, calls[key]),
                        "error": float(f"{self.errors[key]:.3g}"),
                    }
                )

    def _is_missing(self, key: Key, length: int, name: str) -> bool:
        own = [r for r in self._of(key, name) if r["T"] <= length]
        if any(r["T"] == length for r in own):
            return False
        if any((r["mechanism"], r["causal"]) == key and r["pass"] == name for r in self.left_out):
            return False
        seconds = _expected([(r["T"], r["ms"]) for r in own], length)
        if seconds > self.plan.pass_seconds:
            self._leave_out(key, length, name, f"a pass of about {seconds:.0f} s is to be expected")
            return False
        return True

    def _of(self, key: Key, name: str) -> list[Record]:
        return [r for r in self.records if (r["mechanism"], r["causal"], r["pass"]) == (*key, name)]

    def _runs(self, key: Key, length: int, name: str, call: Callable[[], object]) -> bool:
        try:
            call()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if "memory" not in str(error).lower():
                raise
            self._leave_out(key, length, name, "too little memory")
            return False
        return True

    def _leave_out(self, key: Key, length: int, name: str, why: str) -> None:
        facts = {"mechanism": key.mechanism, "causal": key.causal, "pass": name}
        self.left_out.append(facts | {"from_T": length, "why": why})

    def _peak(self, key: Key, length: int, name: str, call: Callable[[], object]) -> float | None:
        """GiB that a pass holds besides its layer and its input."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            call()
            grown: int | None = torch.cuda.max_memory_allocated(self.device) - before
        else:
            threads = torch.get_num_threads()
            grown = apart(grow, key, self.plan, length, name, threads)
        return None if grown is None else float(f"{grown / 2**30:.4g}")


def grow(key: Key, plan: Plan, length: int, name: str, threads: int) -> int:
    """Bytes by which this process grows in a pass: for a process of its own."""
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    for size in (min(length, 256), length):
        layer = make(key, plan, size, device, plan.dtype)
        call = passes(layer, draw(plan, size, device, plan.dtype))[name]
        if size < length:
            call()
    return growth(call)


def _expected(times: list[tuple[int, float]], length: int) -> float:
    """Seconds of a pass, from the two longest ones so far."""
    if len(times) < 2:
        return 0.0
    (shorter, first), (longer, last) = sorted(times)[-2:]
    power = math.log(last / first) / math.log(longer / shorter)
    return float(last / 1000 * (length / longer) ** min(max(1.0, power), 2.0))


def bench(
    *,
    out: Path | None = None,
    device: str = "auto",
    quick: bool = False,
    minutes: float | None = None,
    resume: bool = False,
    redraw: Path | None = None,
    plan: Plan | None = None,
) -> Path:
    """Measures, prints tables, writes records and a plot; the path of the records.

    Args:
        out: benchmarks/results/scaling-cpu.json (scaling-gpu.json on a GPU) in a checkout and the
            working directory elsewhere; a quick look goes to runs/.
        minutes: no further length is begun after this time.
        resume: keep what the file holds and measure the rest.
        redraw: measure nothing, print and draw what this file holds.
    """
    from rankone.bench.scaling_summary import publish

    if redraw is not None:
        return publish(redraw, _result(redraw))
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes must be positive, got {minutes}")
    where = pick_device(device)
    plan = plan or (QUICK if quick else GPU if where.type == "cuda" else CPU)
    path = _default_path(where, quick) if out is None else out
    if where.type == "cpu":
        keep_memory()  # or sizes at which memory is new each time would cost more than others
    stamp, began = provenance.collect(where.type), time.monotonic()
    earlier = _resumed(path, stamp, plan) if resume and path.is_file() else {}
    records: list[Record] = earlier.get("records", [])
    run = Measurement(plan, where, records)
    with Narrator() as narrator, narrator.stage("lengths", 1 + len(plan.lengths)) as advance:
        run.compare()
        advance()
        for length in plan.lengths:
            if minutes is not None and records and time.monotonic() - began > 60 * minutes:
                narrator.say(f"the time was up at T = {length}: --resume measures the rest")
                break
            run.length(length)
            seconds = earlier.get("seconds", 0.0) + time.monotonic() - began
            busy = [x for x in (earlier.get("other_cores"), run.clock.other_cores) if x is not None]
            content = stamp | {
                "other_cores": max(busy, default=None),
                "seconds": round(seconds, 1),
                "exponents": exponents(records, plan.fit_from),
                "crossovers": crossovers(records),
                "records": records,
                "left_out": run.left_out,
                "options": {name: str(options) for name, options in OPTIONS.items()},
            }
            write_json(path, content)
            advance()
    return publish(path, read_json(path))


def _default_path(where: torch.device, quick: bool) -> Path:
    name = "scaling-gpu" if where.type == "cuda" else "scaling-cpu"
    if quick:
        return Path("runs") / f"{name}-quick.json"
    checkout = Path("benchmarks").is_dir() and Path("src/rankone").is_dir()
    return (Path("benchmarks/results") if checkout else Path()) / f"{name}.json"


def _result(path: Path) -> dict[str, Any]:
    """The content of a file of results."""
    found = read_json(path)
    if not isinstance(found, dict) or not found.get("records") or "crossovers" not in found:
        raise ValueError(f"{path} is no result of rankone bench scaling")
    return found


def _resumed(path: Path, stamp: Record, plan: Plan) -> dict[str, Any]:
    """What the file holds, if it was measured here, by this code and plan."""
    found = _result(path)
    now = {name: stamp[name] for name in ("device", "versions", "commit", "threads")}
    for name, here in now.items():
        if found.get(name) != here:
            raise ValueError(
                f"{path} cannot be resumed: its {name} is {found.get(name)}, here it is {here}"
            )
    sizes = {"dtype": str(plan.dtype).removeprefix("torch."), "D": plan.dim, "H": plan.heads}
    for record in found["records"]:
        for name, here in sizes.items():
            if record[name] != here:
                raise ValueError(
                    f"{path} cannot be resumed: its {name} is {record[name]}, here it is {here}"
                )
    return found


def exponents(records: list[Record], fit_from: int) -> list[Record]:
    """The slopes of time and memory against T, both logarithmic, of every line."""
    found = []
    for key in lines():
        for name in PASSES:
            own = [
                r
                for r in records
                if (r["mechanism"], r["causal"], r["pass"]) == (*key, name) and r["T"] >= fit_from
            ]
            if len(own) >= 3:
                found.append(
                    {
                        "mechanism": key.mechanism,
                        "causal": key.causal,
                        "pass": name,
                        "from_T": fit_from,
                        "to_T": max(r["T"] for r in own),
                        "ms_exponent": slope([(r["T"], r["ms"]) for r in own]),
                        "peak_gib_exponent": slope(
                            [(r["T"], r["peak_gib"]) for r in own if r["peak_gib"]]
                        ),
                    }
                )
    return found


def crossovers(records: list[Record]) -> list[Record]:
    """The length from which on a line is faster than softmax attention of its kind.

    Between two lengths that were measured times are powers of T; `T` is None where a line is not
    faster at the longest of them.
    """
    found = []
    for key in lines():
        for name in PASSES if key.mechanism != "softmax" else ():
            ours, theirs = (
                {
                    r["T"]: r["ms"]
                    for r in records
                    if (r["mechanism"], r["causal"], r["pass"]) == (who, key.causal, name)
                }
                for who in (key.mechanism, "softmax")
            )
            both = sorted(ours.keys() & theirs.keys())
            if both:
                ratios = [(T, ours[T] / theirs[T]) for T in both]
                facts = {"mechanism": key.mechanism, "causal": key.causal, "pass": name}
                found.append(facts | {"T": _crossing(ratios)})
    return found


def _crossing(ratios: list[tuple[int, float]]) -> int | None:
    """Where the ratio falls below 1 for good.

    >>> _crossing([(1024, 2.0), (2048, 0.5), (4096, 0.2)]), _crossing([(1024, 0.5), (2048, 0.4)])
    (1448, 1024)
    """
    if ratios[-1][1] >= 1:
        return None
    for (shorter, before), (longer, after) in reversed(list(pairwise(ratios))):
        if before >= 1 > after:
            share = math.log(before) / math.log(before / after)
            return int(shorter * (longer / shorter) ** share + 0.5)
    return ratios[0][0]
