"""What a run has found so far, and the file that it is kept in."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankone.bench.cases import Record
from rankone.bench.summary import exponents, with_ratios
from rankone.storage import read_json, write_bytes, write_json

_LISTS = ("records", "parity", "absent", "left_out")
_ORIGIN = ("device", "versions", "commit", "threads")
"""What must agree for a file to be resumed."""


@dataclass
class Findings:
    """Flat records: times, errors, and what was not measured, with the reason."""

    records: list[Record] = field(default_factory=list)
    parity: list[Record] = field(default_factory=list)
    absent: list[Record] = field(default_factory=list)
    left_out: list[Record] = field(default_factory=list)
    bandwidth: float = math.nan
    """Bytes a second of a copy on the device, read and written."""
    other_cores: float | None = None
    """Cores that other programs kept busy while times were taken."""

    def times(self, **facts: Any) -> list[Record]:
        """The times that agree with the facts."""
        return list(agreeing(self.records, **facts))

    def errors(self, **facts: Any) -> list[Record]:
        """The comparisons that agree with the facts."""
        return list(agreeing(self.parity, **facts))


def agreeing(records: Iterable[Record], **facts: Any) -> Iterable[Record]:
    """The records that hold these facts.

    >>> list(agreeing([{"op": "a", "T": 1}, {"op": "b", "T": 1}], T=1, op="b"))
    [{'op': 'b', 'T': 1}]
    """
    return (record for record in records if facts.items() <= record.items())


class ResultFile:
    """The file of a run: written as a whole after every shape, and taken back if need be."""

    def __init__(self, path: Path, stamp: dict[str, Any], *, resume: bool) -> None:
        self.path, self._stamp = path, stamp
        self._old = path.read_bytes() if path.is_file() else None
        self._began = time.monotonic()
        self._seconds = 0.0
        self.findings = Findings()
        if resume and self._old is not None:
            self._take_up(read_json(path))

    def write(self) -> None:
        """Writes all that was found, ratios included."""
        found = self.findings
        spent = self._seconds + time.monotonic() - self._began
        content = {
            **self._stamp,
            "other_cores": found.other_cores,
            "copy_gb_per_s": float(f"{found.bandwidth / 1e9:.4g}"),
            "seconds": round(spent, 1),
            "exponents": exponents(found.records),
            "records": with_ratios(found.records, found.bandwidth),
        }
        write_json(self.path, content | {name: getattr(found, name) for name in _LISTS[1:]})

    def take_back(self) -> None:
        """The file as it was before the run."""
        if self._old is not None:
            write_bytes(self.path, self._old)
        else:
            self.path.unlink(missing_ok=True)

    def _take_up(self, content: Any) -> None:
        """Begins with what the file holds; ValueError if it is from elsewhere."""
        if not isinstance(content, dict) or any(name not in content for name in _LISTS):
            raise ValueError(f"{self.path} is no result of rankone bench ops: it cannot be resumed")
        for name in _ORIGIN:
            if content.get(name) != self._stamp[name]:
                raise ValueError(
                    f"{self.path} cannot be resumed: its {name} is {content.get(name)}, "
                    f"here it is {self._stamp[name]}"
                )
        self.findings = Findings(content["records"], content["parity"])
        self._seconds = float(content["seconds"])
