"""Makes machine code of what was emitted, and runs it on PyTorch's own threads.

PyTorch's threads stay awake for some milliseconds after every parallel loop. Threads of another
kind would have to share the cores with them, and lose more time to that than short calls take; so
a kernel runs as one more loop of PyTorch's OpenMP library. Where that cannot be found, threads are
Python's.
"""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from llvmlite import binding
from torch import Tensor

from rankone.ops.walk.emitter import processor

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Compiled(NamedTuple):
    """A function in memory, which is there as long as this is. It takes the address of a table, and
    several threads may run it on one table at once."""

    engine: Any
    address: int

    @classmethod
    def of(cls, module: Any, name: str) -> Compiled:
        """The function of a module of LLVM's language."""
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        parsed = binding.parse_assembly(str(module))
        parsed.verify()
        cpu, features = processor()
        target = binding.Target.from_default_triple()
        machine = target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)
        options = binding.create_pipeline_tuning_options(speed_level=3)
        options.loop_vectorization = options.slp_vectorization = False  # it is in vectors already
        passes = binding.create_pass_builder(machine, options)
        passes.getModulePassManager().run(parsed, passes)
        engine = binding.create_mcjit_compiler(parsed, machine)
        engine.finalize_object()
        return cls(engine, engine.get_function_address(name))

    def run(self, table: int, threads: int) -> None:
        """On some threads at once."""
        if threads < 2:
            _FUNCTION(self.address)(table)
        elif (parallel := _openmp()) is not None:
            parallel(self.address, table, threads, 0)
        else:
            running = [
                _pool(threads).submit(_FUNCTION(self.address), table) for _ in range(threads)
            ]
            for thread in running:
                thread.result()


@cache
def _openmp() -> Any:
    """PyTorch's GOMP_parallel(function, argument, threads, flags), if it has one."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        try:
            parallel = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return parallel
    return None


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads that stay: to start one takes as long as a hundred tokens."""
    return ThreadPoolExecutor(threads, thread_name_prefix="rankone-walk")


def large_pages(x: Tensor) -> Tensor:
    """Asks Linux for pages of 2 MB for a large new tensor, and gives it back.

    Large memory is new memory in every call, and it takes Linux as long to give 4 KB of it as the
    walk takes for two tokens.
    """
    size = x.numel() * x.element_size()
    if size >= 2 * _PAGE and (advise := _madvise()) is not None:
        first = -(-x.data_ptr() // _PAGE) * _PAGE
        last = (x.data_ptr() + size) // _PAGE * _PAGE
        advise(first, last - first, _HUGE)
    return x


_PAGE = 2 << 20
_HUGE = 14


@cache
def _madvise() -> Any:
    """Linux's madvise(begin, size, advice)."""
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise
