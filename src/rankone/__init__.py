"""rankone: linear transformers as one rank-one update a token.

A linear transformer keeps a small matrix, and every token writes one rank-one update into it. This
package holds the update itself as operations on tensors (`rankone.ops`), a laboratory for what such
models learn in context (`rankone.icl`), where its data comes from (`rankone.tasks`) and how results
become tables and figures (`rankone.report`).

Importing `rankone` is cheap: a subpackage, and PyTorch with it, is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankone import icl as icl
    from rankone import ops as ops
    from rankone import report as report
    from rankone import tasks as tasks

__version__ = "0.1.0"

_SUBPACKAGES = ("icl", "ops", "report", "tasks")


def __getattr__(name: str) -> ModuleType:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBPACKAGES])
