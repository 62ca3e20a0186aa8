import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from rankone.allocation import keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(2**22)  # 16 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.ones(2**25)
without = faults()
if not keep_memory():
    raise SystemExit(77)
faults()
print(without, faults())
"""


def test_memory_that_is_kept_is_not_asked_for_again():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("this C library has no such setting")
    without, kept = map(int, done.stdout.split())
    assert kept < max(100, without / 20)


def test_other_systems_are_left_alone(monkeypatch):
    from rankone import allocation

    monkeypatch.setattr(sys, "platform", "darwin")
    assert not allocation.keep_memory()
