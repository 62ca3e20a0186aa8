"""What a person sees while long work goes on: bars with the time left, and messages above them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

N = TypeVar("N", bound="Narrator")


class Narrator:
    """Tells how far long work is. Without a terminal it prints a line now and then."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet)
        self._progress = Progress(
            TextColumn("{task.description:<26}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
        )
        self._quiet = quiet
        self.seconds: dict[str, float] = {}
        """Time spent in each stage so far."""

    def __enter__(self: N) -> N:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._progress.console.print(text, highlight=False, markup=False)

    @contextmanager
    def stage(self, name: str, total: int, *, done: int = 0) -> Iterator[Callable[[], None]]:
        """A bar for a stage of `total` parts, of which some are done; the callback advances it by
        one."""
        task = self._progress.add_task(name, total=total, completed=done)
        if not self.console.is_terminal:
            self.say(f"{name}: {total} parts")
        began = time.monotonic()
        try:
            yield lambda: self._progress.advance(task)
        finally:
            self.seconds[name] = round(time.monotonic() - began, 1)
