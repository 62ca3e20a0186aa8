"""The most memory that one pass holds at a time: its inputs, and by how much the process grows.

On a GPU PyTorch's allocator counts. On the CPU the pass runs in a fresh process, whose resident
memory Linux counts in pages; what grows by less than `NOISE` is not told.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rankone.bench.cases import Case
from rankone.bench.peers import Bound, bind, find

NOISE = 2**20
"""Bytes of growth below which a process tells nothing about a pass."""

_STATUS = Path("/proc/self/status")
_WARM_UP = 64
_PRELOADED = ["rankone.bench.memory", "transformers.models.qwen3_next.modeling_qwen3_next"]


def peak_gib(case: Case, bound: Bound, name: str) -> float | None:
    """GiB that the pass called `name` holds at its highest, inputs included; None if not known."""
    if case.device.type == "cuda":
        grown: int | None = _gpu_growth(case, bound, name)
    else:
        grown = _cpu_growth(case, bound, name)
    if grown is None:
        return None
    inputs = [x for key, x in bound.tensors.items() if name != "forward" or key != "d_o"]
    return (grown + sum(x.nbytes for x in inputs)) / 2**30


def _gpu_growth(case: Case, bound: Bound, name: str) -> int:
    call = bound.passes()[name]
    call()
    torch.cuda.synchronize(case.device)
    before = torch.cuda.memory_allocated(case.device)
    torch.cuda.reset_peak_memory_stats(case.device)
    call()
    torch.cuda.synchronize(case.device)
    return torch.cuda.max_memory_allocated(case.device) - before


def _cpu_growth(case: Case, bound: Bound, name: str) -> int | None:
    decay = "decay" in bound.implementation.leaves
    return apart(grow, case, bound.implementation.name, decay, name, torch.get_num_threads())


def apart(measure: Callable[..., int], *arguments: Any) -> int | None:
    """What a function finds in a process of its own: bytes by which that grew. None where the
    system does not tell, or the process ends, or growth is too small to be told."""
    if not _STATUS.is_file():
        return None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            grown = pool.submit(measure, *arguments).result()
    except BrokenProcessPool:  # ended by the system, for want of memory as a rule
        return None
    return grown if grown >= NOISE else None


def grow(case: Case, impl: str, decay: bool, name: str, threads: int) -> int:
    """Bytes by which this process grows at most while one pass runs: for a process of its own."""
    torch.set_num_threads(threads)
    small = replace(case, shape=case.shape._replace(T=_WARM_UP))
    bind(find(impl, small, decay=decay), small.inputs(decay=decay)).passes()[name]()
    bound = bind(find(impl, case, decay=decay), case.inputs(decay=decay))
    return growth(bound.passes()[name])


def growth(call: Callable[[], object]) -> int:
    """Bytes by which this process grows at most while a call runs; where Linux tells."""
    _give_back()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is what is held now
    before = _resident("VmRSS")
    call()
    return max(0, _resident("VmHWM") - before)


def _give_back() -> None:
    """Returns freed memory to the system, so that it does not hide growth (glibc)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def _resident(key: str) -> int:
    """A line of the process's status in bytes."""
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])
