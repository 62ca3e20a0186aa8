"""The measurement itself: errors first, then times and memory, case by case."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import torch

from rankone.bench.cases import PASSES, SOFTMAX, Case, Plan, Record, Shape
from rankone.bench.clock import Clock, Timing, copy_bandwidth
from rankone.bench.memory import peak_gib
from rankone.bench.parity import Truth, attention_truth, compare, truth_of
from rankone.bench.peers import AbsentError, Bound, Implementation, Tensors, bind, find, one_line
from rankone.bench.results import Findings
from rankone.errors import BackendUnavailableError
from rankone.progress import Narrator


class Entry(NamedTuple):
    """An implementation by name, with decay or without."""

    impl: str
    decay: bool


class Measurement:
    """All cases of a plan on one device; what is found goes into `findings`."""

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        findings: Findings,
        narrator: Narrator,
        minutes: float | None = None,
    ) -> None:
        self.plan, self.device, self.findings, self.narrator = plan, device, findings, narrator
        self.clock = Clock(device, plan.effort)
        self._deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
        findings.absent.clear()
        findings.left_out.clear()

    def everything(self, ops: Sequence[str], save: Callable[[], None]) -> None:
        """Bandwidth, errors at a small length, then every case; `save` is called after each.

        Raises ParityError where an implementation of ours is wrong.
        """
        self.findings.bandwidth = copy_bandwidth(self.clock, self.plan.copied)
        entries: dict[str, list[Entry]] = {}
        with self.narrator.stage("parity", 2 * len(ops)) as advance:
            for op, decay in product(ops, (False, True)):
                entries.setdefault(op, []).extend(self._agreeing(op, decay))
                advance()
        cases = [self._case(op, shape) for shape in self.plan.shapes for op in ops]
        with self.narrator.stage("timing", len(cases)) as advance:
            for case in cases:
                self._measure(case, entries[case.op])
                self.findings.other_cores = self.clock.other_cores
                save()
                advance()

    def _case(self, op: str, shape: Shape) -> Case:
        return Case(op, shape, self.plan.dtype, self.device)

    def _agreeing(self, op: str, decay: bool) -> list[Entry]:
        """The implementations that are there, after each was compared with the definition."""
        shape = self.plan.shapes[0]._replace(B=1, T=self.plan.compared)
        case = self._case(op, shape)
        inputs = case.inputs(decay=decay)
        truth = truth_of(case, inputs, "reference")
        found = []
        for impl in self.plan.impls:
            try:
                implementation = find(impl, case, decay=decay)
                own = attention_truth(inputs) if impl in SOFTMAX else truth
                self._compare(case, implementation, inputs, own)
            except AbsentError as reason:
                facts = {"op": op, "impl": impl, "decay": decay}
                self.findings.absent.append(facts | {"why": str(reason)})
            else:
                found.append(Entry(impl, decay))
        return found

    def _compare(
        self, case: Case, implementation: Implementation, inputs: Tensors, truth: Truth
    ) -> None:
        """Adds the errors to the findings; an implementation that cannot run is `AbsentError`."""
        try:
            record = compare(case, implementation, inputs, truth)
        except BackendUnavailableError as error:
            raise AbsentError(str(error)) from error
        except Exception as error:  # a stranger's kernel can fail in any way
            if implementation.ours:
                raise
            raise AbsentError(f"it fails: {one_line(error)}") from error
        key = {name: record[name] for name in (*case.facts(False), "decay", "impl", "truth")}
        for old in self.findings.errors(**key):
            self.findings.parity.remove(old)
        self.findings.parity.append(record)

    def _measure(self, case: Case, entries: list[Entry]) -> None:
        """Errors in full shape, then both passes, of all that the findings do not hold yet."""
        missing = [entry for entry in entries if self._is_missing(case, entry)]
        if not missing:
            return
        if time.monotonic() > self._deadline:
            for entry in missing:
                self._leave_out(case, entry, "the time was up")
            return
        try:
            for decay in (False, True):
                self._compare_in_full(case, [e for e in missing if e.decay == decay], decay)
            for name in PASSES:
                self._time(case, missing, name)
        except torch.OutOfMemoryError as error:
            for entry in missing:
                self._leave_out(case, entry, one_line(error))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _is_missing(self, case: Case, entry: Entry) -> bool:
        """Whether the entry is to be measured here and has not been yet."""
        chosen = [shape for impl, shape in self.plan.only_at if impl == entry.impl]
        if chosen and case.shape not in chosen:
            return False
        if entry.impl in SOFTMAX and self.plan.longest_attention < case.shape.T:
            self._leave_out(case, entry, "the cost is quadratic in T")
            return False
        done = self.findings.times(**case.facts(entry.decay), impl=entry.impl)
        return len(done) < len(PASSES)

    def _leave_out(self, case: Case, entry: Entry, why: str, **more: str) -> None:
        facts = {**case.facts(entry.decay), "impl": entry.impl, **more, "why": why}
        if facts not in self.findings.left_out:
            self.findings.left_out.append(facts)

    def _compare_in_full(self, case: Case, entries: list[Entry], decay: bool) -> None:
        """Every entry but softmax attention beside the form in chunks, in float64."""
        peers_too = self.plan.longest_compared_peer >= case.shape.T
        inputs = case.inputs(decay=decay)
        truth: Truth | None = None
        for entry in entries:
            implementation = find(entry.impl, case, decay=decay)
            if entry.impl not in SOFTMAX and (implementation.ours or peers_too):
                truth = truth or truth_of(case, inputs, "chunked")
                try:
                    self._compare(case, implementation, inputs, truth)
                except AbsentError as reason:
                    self._leave_out(case, entry, str(reason))

    def _time(self, case: Case, entries: list[Entry], name: str) -> None:
        """One pass of all entries in turn; a record for each."""
        drawn = case.inputs(decay=True)
        bounds: dict[Entry, Bound] = {}
        for entry in entries:
            if self.findings.times(**case.facts(entry.decay), impl=entry.impl, **{"pass": name}):
                continue
            seconds = self._expected(case, entry, name)
            if seconds > self.plan.pass_seconds:
                why = f"a pass of about {seconds:.0f} s is to be expected"
                self._leave_out(case, entry, why, **{"pass": name})
                continue
            inputs = {key: x for key, x in drawn.items() if entry.decay or key != "decay"}
            bound = bind(find(entry.impl, case, decay=entry.decay), inputs)
            if self._runs(case, entry, bound, name):
                bounds[entry] = bound
        calls = {entry: bound.passes()[name] for entry, bound in bounds.items()}
        for entry, timing in self.clock.race(calls, graphs=True).items():
            peak = peak_gib(case, bounds[entry], name)
            self.findings.records.append(self._record(case, entry, name, timing, peak))

    def _runs(self, case: Case, entry: Entry, bound: Bound, name: str) -> bool:
        """Whether a peer runs at all here; ours may raise."""
        if bound.implementation.ours:
            return True
        try:
            bound.passes()[name]()
        except Exception as error:  # a stranger's kernel can fail in any way
            self._leave_out(case, entry, f"it fails: {one_line(error)}", **{"pass": name})
            return False
        return True

    def _expected(self, case: Case, entry: Entry, name: str) -> float:
        """Seconds of a pass, from the two longest ones so far with the other sizes the same."""
        facts = case.facts(entry.decay) | {"impl": entry.impl, "pass": name}
        del facts["T"]
        times = {r["T"]: r["ms"] for r in self.findings.times(**facts) if r["T"] < case.shape.T}
        if len(times) < 2:
            return 0.0
        (shorter, first), (longer, last) = sorted(times.items())[-2:]
        power = math.log(last / first) / math.log(longer / shorter)
        return float(last / 1000 * (case.shape.T / longer) ** max(1.0, power))

    def _record(
        self, case: Case, entry: Entry, name: str, timing: Timing, peak: float | None
    ) -> Record:
        facts = case.facts(entry.decay)
        compared = self.findings.errors(**facts, impl=entry.impl)
        if not compared:
            short = facts | {"B": 1, "T": self.plan.compared}
            compared = self.findings.errors(**short, impl=entry.impl)
        return {
            "op": case.op,
            "impl": entry.impl,
            "pass": name,
            **facts,
            "ms": _round(timing.ms),
            "peak_gib": _round(peak),
            "fastest_ms": _round(timing.fastest_ms),
            "host_ms": _round(timing.host_ms),
            "graph_ms": _round(timing.graph_ms),
            "rounds": timing.rounds,
            "repeats": timing.repeats,
            "error": compared[-1]["error"],
            "gradient_error": compared[-1]["gradient_error"],
            "within": compared[-1]["within"],
        }


def _round(value: float | None) -> float | None:
    """Five digits.

    >>> _round(1234.5678)
    1234.6
    """
    return None if value is None else float(f"{value:.5g}")
