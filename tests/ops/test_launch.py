"""Launches that look up what Triton found before; without a GPU the kernel is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton  # noqa: F401 - this module is left out where it is missing
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from rankone.ops import launch as module
from rankone.ops import tiles
from rankone.ops.delta_rule import kernels as delta
from rankone.ops.delta_rule import transfer
from rankone.ops.linear_attention import kernels as linear


class Kernel:
    """Counts how often it was looked up the long way, and keeps what it was run with."""

    params = ("a", "b", "n", "x", "SIZE")

    def __init__(self) -> None:
        self.found, self.ran = 0, []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.found += 1
            self.options = options
            return SimpleNamespace(
                run=lambda *given: self.ran.append(given), function="f", packed_metadata="m"
            )

        return run


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    stream = SimpleNamespace(get_current_stream=lambda device: "stream")
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=stream))
    return Kernel()


A, B = torch.zeros(8), torch.zeros(8)


def run(kernel, a=A, b=B, n=5, x=0.5, size=3, warps=4):
    module.launch(kernel, 7, (a, b, n, x), {"SIZE": size}, warps=warps)


def test_a_kernel_is_looked_up_once_and_then_run_with_pointers(kernel):
    run(kernel)
    run(kernel, b=A, n=6, x=0.25)
    assert kernel.found == 1
    assert kernel.options == {"SIZE": 3, "num_warps": 4}
    where = A.data_ptr()
    head = (7, 1, 1, "stream", "f", "m", None, None, None)
    assert kernel.ran == [(*head, where, where, 6, 0.25, None)]


@pytest.mark.parametrize(
    "other",
    [{"a": A.double()}, {"b": None}, {"n": 2**31}, {"size": 4}, {"warps": 8}],
    ids=["dtype", "none", "int", "constant", "warps"],
)
def test_what_makes_another_kernel_is_looked_up_again(kernel, other):
    run(kernel)
    run(kernel, **other)
    run(kernel, **other)
    assert kernel.found == 2
    assert len(kernel.ran) == 1


def test_tensors_that_begin_between_are_looked_up_each_time(kernel):
    run(kernel)
    for _ in range(2):
        run(kernel, a=torch.zeros(9)[1:])
    assert kernel.found == 3
    assert not kernel.ran


def test_a_profiler_sees_launches(kernel, monkeypatch):
    hook = SimpleNamespace(calls=[print])
    runtime = SimpleNamespace(launch_enter_hook=hook)
    monkeypatch.setattr(module, "knobs", SimpleNamespace(runtime=runtime))
    run(kernel)
    run(kernel)
    assert kernel.found == 2


def test_another_device_than_the_current_one_becomes_current(kernel, monkeypatch):
    entered = []

    class Device:
        def __init__(self, number):
            self.number = number

        def __enter__(self):
            entered.append(self.number)

        def __exit__(self, *reason):
            pass

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", Device)
    run(kernel)
    assert entered == [0]
    assert kernel.found == 1


def kernels():
    for source in (tiles, linear, delta, transfer):
        for name, found in vars(source).items():
            if name.endswith("_kernel") and isinstance(found, JITFunction | InterpretedFunction):
                yield pytest.param(found, id=f"{source.__name__.split('.')[-2]}.{name}")


@pytest.mark.parametrize("found", list(kernels()))
def test_kernels_are_compiled_for_nothing_else_that_changes(found):
    """Their numbers are not looked at, and constants come last."""
    jitted = found if isinstance(found, JITFunction) else JITFunction(found.fn, **found.kwargs)
    constants = [p.is_constexpr for p in jitted.params]
    assert constants == sorted(constants)
    for p in jitted.params:
        assert p.is_constexpr or p.name.endswith("_ptr") or p.do_not_specialize, p.name
