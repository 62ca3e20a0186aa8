"""What holds for the tests and for the examples in the package's docstrings alike."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# Lines without indentation: what a module cannot be imported without.
_NEEDS_TRITON = re.compile(r"^(import|from) triton\b", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    import torch

    asked = int(os.environ.get("OMP_NUM_THREADS") or 2)
    torch.set_num_threads(min(2, os.cpu_count() or 1, asked))
    if not torch.cuda.is_available():
        # Triton reads this when a kernel is defined: from here on kernels are interpreted.
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out modules that cannot be imported where Triton is not installed."""
    if collection_path.suffix != ".py" or find_spec("triton") is not None:
        return None
    return True if _NEEDS_TRITON.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start every test from the same seeds; samplers take their own generators all the same."""
    import random

    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
