"""The five tasks of the Long Range Arena (Tay et al. 2021), from generators or data at hand.

ListOps and Pathfinder are drawn as the arena draws them. Its reviews, papers and pictures cannot be
shipped: `TASKS` has stand-ins and says so, and CIFAR-10 can be read from a folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankone.tasks.long_range import image, listops, pathfinder, retrieval, text
from rankone.tasks.long_range.examples import Batch, Examples, Splits, split

Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class Source:
    """Where the examples of a task come from."""

    make: Callable[..., Splits]
    """Takes the sizes of the splits and a seed."""
    arena: bool
    """Whether it is the arena's task, so that published numbers can stand beside ours."""
    told: str
    """What it is, in a line."""


@dataclass(frozen=True)
class Task:
    """One of the five."""

    vocabulary: int
    classes: int
    max_length: int
    pair: bool
    sources: dict[str, Source]
    """By name; the first is taken unless another is asked for."""
    small: dict[str, Any]
    """What makes it small enough for a look: options of the first source."""
    small_length: int
    """Longest sequence of that."""

    def source(self, name: str | None) -> tuple[str, Source]:
        """A source by name."""
        name = name or next(iter(self.sources))
        if name not in self.sources:
            raise ValueError(f"data must be one of {', '.join(self.sources)}, got {name!r}")
        return name, self.sources[name]


TASKS: dict[str, Task] = {
    "listops": Task(
        vocabulary=listops.VOCABULARY,
        classes=10,
        max_length=2000,
        pair=False,
        sources={"trees": Source(listops.listops, True, "nested lists, drawn as the arena does")},
        small={"trees": listops.SMALL},
        small_length=200,
    ),
    "text": Task(
        vocabulary=text.VOCABULARY,
        classes=2,
        max_length=4000,
        pair=False,
        sources={
            "reviews": Source(text.reviews, False, "made-up reviews in bytes, for IMDb's"),
            "sources": Source(text.sources, False, "the Python library: tests or not"),
        },
        small={"longest": 500},
        small_length=500,
    ),
    "retrieval": Task(
        vocabulary=text.VOCABULARY,
        classes=2,
        max_length=4000,
        pair=True,
        sources={
            "topics": Source(retrieval.topics, False, "made-up papers in bytes, for AAN's"),
            "halves": Source(retrieval.halves, False, "the Python library: one file or two"),
        },
        small={"longest": 500},
        small_length=500,
    ),
    "image": Task(
        vocabulary=image.VOCABULARY,
        classes=10,
        max_length=1024,
        pair=False,
        sources={"digits": Source(image.digits, False, "scikit-learn's digits, for CIFAR-10")},
        small={},
        small_length=1024,
    ),
    "pathfinder": Task(
        vocabulary=pathfinder.VOCABULARY,
        classes=2,
        max_length=1024,
        pair=False,
        sources={
            "hard": Source(pathfinder.pathfinder, True, "32 × 32, drawn as the arena's were"),
        },
        small={"scene": pathfinder.Scene(dashes=6)},
        small_length=1024,
    ),
}
"""All tasks by name."""


def check_folder(task: str, data: str | None, folder: Path | None) -> None:
    """Raises ValueError for a folder that no pictures can be read from."""
    if folder is None:
        return
    if task != "image" or data is not None:
        raise ValueError("a folder holds pictures: it is for the task image, without data")
    image.check(folder)


def load(
    task: str,
    sizes: Sizes,
    *,
    data: str | None = None,
    folder: Path | None = None,
    small: bool = False,
    seed: int = 0,
) -> tuple[str, Splits]:
    """The name of a task's source, and its examples; `folder` is one with CIFAR-10, for images."""
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    check_folder(task, data, folder)
    if folder is not None:
        return "cifar", image.cifar(folder)
    name, source = TASKS[task].source(data)
    options = TASKS[task].small if small else {}
    return name, source.make(sizes, seed=seed, **options)


__all__ = ["TASKS", "Batch", "Examples", "Source", "Splits", "Task", "load", "split"]
