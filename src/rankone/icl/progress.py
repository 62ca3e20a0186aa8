"""What a person sees while a reproduction runs: a bar with the time left, messages, the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import TaskID

from rankone import progress
from rankone.icl.training import Recipe


class Narrator(progress.Narrator):
    """Tells how far a reproduction is."""

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
