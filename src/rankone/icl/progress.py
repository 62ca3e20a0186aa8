"""What a person sees while a reproduction runs: a bar with the time left, messages, the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from rankone.icl.training import Recipe


class Narrator:
    """Tells how far a reproduction is. Without a terminal it prints a line now and then."""

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

    def __enter__(self) -> Narrator:
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
        self._progress.console.print(text, highlight=False)

    def training(self, runs: int, recipe: Recipe) -> Callable[[str, int, int, list[str]], None]:
        """A progress callback for `fit`."""
        tasks: dict[str, TaskID] = {}
        names = {"heats": f"choosing {runs} of {runs * recipe.heats} starts"}

        def report(stage: str, step: int, steps: int, messages: list[str]) -> None:
            if stage not in tasks:
                name = names.get(stage, f"training {runs} models")
                tasks[stage] = self._progress.add_task(name, total=steps, completed=step - 1)
                if not self.console.is_terminal:
                    self.say(f"{name}: {steps} steps")
            self._progress.update(tasks[stage], completed=step)
            for message in messages:
                self.say(f"{stage}: {message}")

        return report

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar for a stage of `total` parts; the callback advances it by one."""
        task = self._progress.add_task(name, total=total)
        if not self.console.is_terminal:
            self.say(f"{name}: {total} parts")
        began = time.monotonic()
        try:
            yield lambda: self._progress.advance(task)
        finally:
            self.seconds[name] = round(time.monotonic() - began, 1)

    def finish(self, table: list[Any], page: Path, target: str, seconds: float) -> None:
        """Prints the table and where the report is, on standard output."""
        if self._quiet:
            return
        from rankone.report.tables import table1_text

        console = Console()
        if target in ("table1", "fig1", "all"):
            width = console.width if console.is_terminal else 120
            console.print(table1_text(table, width=width))
        console.print(f"done in {seconds:.0f} s; report: {page}", highlight=False, soft_wrap=True)
