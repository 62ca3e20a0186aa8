"""The fused kernels compile for real GPUs, and the compiler does not give up on any."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import triton  # noqa: F401 - this module is left out where it is missing

from rankone import cli
from rankone.bench.compiled import SHARED, Kernel

# (op, B, T, H, K, V, dtype, decay, states): layouts of all kinds, pieces and narrow columns too.
CALLS = [
    ("linear_attention", 16, 2048, 16, 128, 128, "bfloat16", True, False),
    ("linear_attention", 1, 8192, 4, 64, 64, "bfloat16", True, True),
    ("linear_attention", 1, 4096, 2, 256, 64, "float16", False, True),
    ("linear_attention", 40, 100, 2, 128, 128, "float32", True, True),
    ("delta_rule", 16, 2048, 16, 128, 128, "bfloat16", True, False),
    ("delta_rule", 1, 4096, 4, 64, 128, "bfloat16", False, True),
    ("delta_rule", 1, 100, 2, 128, 128, "float32", True, True),
    ("delta_rule", 40, 100, 2, 100, 256, "float16", False, True),
]
CODE = """
import dataclasses, json, sys, torch
from rankone.bench.compiled import Layout, compile_call
for op, *sizes, dtype, decay, states in json.loads(sys.argv[1]):
    layout = Layout(*sizes, getattr(torch, dtype), decay, states)
    print(json.dumps([dataclasses.asdict(k) for k in compile_call(op, layout)]))
"""


def without_interpreter() -> dict[str, str]:
    """The environment in which kernels are compiled."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.fixture(scope="module")
def compiled() -> list[list[Kernel]]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(CALLS)],
        capture_output=True, text=True, timeout=600, env=without_interpreter(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [[Kernel(**k) for k in json.loads(line)] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(CALLS)), ids=lambda n: "-".join(map(str, CALLS[n])))
def test_no_kernel_is_starved_and_all_fit_a_multiprocessor(compiled, number):
    kernels = compiled[number]
    assert len(kernels) >= 3
    for kernel in kernels:
        assert not kernel.starved, kernel
        assert kernel.spilled < 3000, kernel
        assert kernel.shared <= 1024 * SHARED[90], kernel


@pytest.mark.parametrize("number", [0, 4])
def test_the_large_products_are_those_of_the_tensor_cores(compiled, number):
    walks = [k for k in compiled[number] if k.name == "scan"]
    assert walks
    assert all(k.tensor_core == "wgmma" for k in walks)


def test_the_command_prints_a_table():
    done = subprocess.run(
        [sys.executable, "-m", "rankone.cli", "bench", "kernels", "--op", "linear_attention",
         "--keys", "32", "--values", "16", "--dtype", "float32", "--capability", "80"],
        capture_output=True, text=True, timeout=300, env=without_interpreter(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "K = 32, V = 16, float32" in done.stdout
    assert "registers" in done.stdout
    assert "163 KiB" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--capability", "70"], "capability must be one of 80, 86"),
        (["--keys", "0"], "keys must be at least 1, got 0"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_refused(options, message, capsys):
    assert cli.main(["bench", "kernels", *options]) == 2
    assert message in capsys.readouterr().err


def test_in_the_interpreter_it_says_so(capsys):
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are not interpreted here")
    assert cli.main(["bench", "kernels"]) == 2
    assert "unset TRITON_INTERPRET" in capsys.readouterr().err
