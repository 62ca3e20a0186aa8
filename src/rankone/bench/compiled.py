"""What the compiler makes of the fused kernels, without a GPU: `rankone bench kernels`.

An operation is called with tensors that have shapes and no data, and each kernel that it would
launch is compiled for a GPU and not run. What a kernel takes of a multiprocessor (registers, shared
memory) says how many programs run side by side; what it spills says that its tiles are too large.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rankone.bench.cases import OPS
from rankone.errors import BackendUnavailableError

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Compute capability → KiB of shared memory that one program may have."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Kernel:
    """One kernel as it was compiled."""

    name: str
    options: str
    """The options that it was compiled with and that are on."""
    warps: int
    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of a thread's stack."""
    shared: int
    """Bytes of a program's shared memory."""
    tensor_core: str
    """The matrix instructions that it has: wgmma, mma, both or none."""

    @property
    def starved(self) -> bool:
        """Whether the compiler gave up: it spills although registers are left."""
        return self.spilled > 0 and self.registers < 100


class Layout(NamedTuple):
    """Sizes of a call."""

    B: int
    T: int
    H: int
    K: int
    V: int
    dtype: torch.dtype
    decay: bool
    states: bool
    """Whether there are initial and last states."""


def compile_call(op: str, layout: Layout, *, capability: int = 90) -> list[Kernel]:
    """The kernels of one call, both passes, in the order in which they would be launched.

    Raises `BackendUnavailableError` without Triton, and under its interpreter.
    """
    with _compiling(capability) as found:
        _CALLS[op](layout)
    return [_resources(kernel, options) for kernel, options in found.values()]


def show(
    *, op: str = "all", keys: int = 128, values: int = 128, heads: int = 16, batch: int = 16,
    length: int = 2048, dtype: str = "bfloat16", capability: int = 90,
) -> None:  # fmt: skip
    """Prints a table for each operation, with and without decay."""
    if op not in ("all", *OPS):
        raise ValueError(f"op must be one of all, {', '.join(OPS)}, got {op!r}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if capability not in SHARED:
        raise ValueError(
            f"capability must be one of {', '.join(map(str, SHARED))}, got {capability}"
        )
    sizes = {"batch": batch, "length": length, "heads": heads, "keys": keys, "values": values}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    console = Console(highlight=False)
    for name in OPS if op == "all" else (op,):
        for decay in (False, True):
            layout = Layout(batch, length, heads, keys, values, DTYPES[dtype], decay, states=False)
            console.print(_table(name, layout, compile_call(name, layout, capability=capability)))
    console.print(f"A program may have {SHARED[capability]} KiB of shared memory.")


def _table(op: str, layout: Layout, kernels: list[Kernel]) -> Table:
    decay = ", decay" if layout.decay else ""
    B, T, H, K, V = layout[:5]
    title = f"{op}{decay}, {B} × {T:,}, H = {H}, K = {K}, V = {V}, {str(layout.dtype)[6:]}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for head in ("kernel", "options"):
        table.add_column(head)
    for head in ("warps", "registers", "spilled", "shared KiB"):
        table.add_column(head, justify="right")
    table.add_column("matrices")
    for k in kernels:
        numbers = (k.warps, k.registers, k.spilled, -(-k.shared // 1024))
        table.add_row(k.name, k.options, *map(str, numbers), k.tensor_core)
    return table


def _linear_attention(layout: Layout) -> None:
    from rankone.ops.linear_attention import triton as linear

    q, k, v, _, decay, state, do = _inputs(layout)
    options = (decay, state, None, 0.1)
    _, _, states = linear.run(q, k, v, *options, layout.states, False)
    linear.run_backward(do, state, q, k, v, decay, state, states, None, 0.1)


def _delta_rule(layout: Layout) -> None:
    from rankone.ops.delta_rule import triton as delta

    q, k, v, beta, decay, state, do = _inputs(layout)
    call = (q, k, v, beta, decay, state)
    _, _, solve, check, turned = delta.run(*call, None, 0.1, layout.states, True)
    delta.run_backward(do, state, *call, solve, check, turned, None, 0.1)


_CALLS: dict[str, Callable[[Layout], None]] = {
    "linear_attention": _linear_attention,
    "delta_rule": _delta_rule,
}


def _inputs(layout: Layout) -> tuple[Any, ...]:
    """q, k, v, beta, decay, a state and dO, without data."""
    B, T, H, K, V, dtype, fades, states = layout

    def empty(*size: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(*size, dtype=of, device="meta")

    decay = empty(B, T, H, of=torch.float32) if fades else None
    state = empty(B, H, K, V, of=torch.float32) if states else None
    q, k, v, do = (empty(B, T, H, size) for size in (K, K, V, V))
    return q, k, v, empty(B, T, H), decay, state, do


@contextmanager
def _compiling(capability: int) -> Iterator[dict[str, tuple[Any, dict[str, Any]]]]:
    """Inside, kernels are compiled and not launched; those that were, by their hashes."""
    try:
        import triton
        from triton.runtime.driver import driver
        from triton.runtime.jit import JITFunction
    except ImportError as error:
        raise BackendUnavailableError(
            "needs the package triton (pip install 'rankone[triton]')"
        ) from error
    if triton.knobs.runtime.interpret:
        raise BackendUnavailableError("compiles kernels: unset TRITON_INTERPRET")
    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    launch, active = JITFunction.run, driver._active

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        found.setdefault(kernel.hash, (kernel, options))
        return kernel

    driver.set_active(_Device(capability))
    JITFunction.run = compiled
    try:
        yield found
    finally:
        JITFunction.run = launch
        driver._active = active


class _Device:
    """As much of a device as the compiler asks about."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        """The number of the device; kernels are kept apart by it."""
        return -self.capability

    def get_current_stream(self, device: int) -> int:
        """None is used."""
        return 0

    def get_current_target(self) -> Any:
        """The architecture."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def _resources(kernel: Any, options: dict[str, Any]) -> Kernel:
    """What the binary says."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        tool = partial(_output, knobs.nvidia.cuobjdump.path, str(binary))
        usage = re.search(r"REG:(\d+) STACK:(\d+)", tool("--dump-resource-usage"))
        code = tool("--dump-sass")
    if usage is None:
        raise BackendUnavailableError("cuobjdump tells nothing about a kernel that was compiled")
    matrices = {"wgmma": "GMMA" in code, "mma": re.search(r"\b[HI]MMA", code) is not None}
    on = [name for name, value in options.items() if value is True]
    tiles = [f"{name} {options[name]}" for name in ("C", "BK", "BV") if name in options]
    return Kernel(
        name=kernel.metadata.name.removesuffix("_kernel"),
        options=", ".join(tiles + [name.lower() for name in on]),
        warps=kernel.metadata.num_warps,
        registers=int(usage[1]),
        spilled=int(usage[2]),
        shared=kernel.metadata.shared,
        tensor_core=" and ".join(name for name, there in matrices.items() if there) or "none",
    )


def _output(tool: str, binary: str, option: str) -> str:
    env = os.environ | {"LC_ALL": "C"}
    done = subprocess.run([tool, option, binary], capture_output=True, text=True, env=env)
    return done.stdout
