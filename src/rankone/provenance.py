"""Where a result comes from: the command, the machine, the versions, the date and the commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rankone

__all__ = [
    "TOLERATED_CORES",
    "busy_seconds",
    "collect",
    "cores",
    "cpu_name",
    "installed_version",
]

TOLERATED_CORES = 0.1
"""Times on the CPU are shown if other programs used less of the machine than this."""

_PACKAGES = ("torch", "numpy", "numba", "triton")


def collect(device: str = "cpu") -> dict[str, Any]:
    """Return what has to stand beside a number so that it can be made again.

    Args:
        device: `cpu`, `cuda` or `cuda:1`: the device that the work ran on.

    Returns:
        A dictionary, ready for JSON: `command`, `device`, `versions`, `date` (UTC, ISO 8601),
        `commit` (None outside a checkout, ending in `-dirty` where the package differs from that
        commit) and `threads`.

    Example:
        >>> sorted(collect())
        ['command', 'commit', 'date', 'device', 'threads', 'versions']
    """
    return {
        "command": shlex.join([_program(), *sys.argv[1:]]),
        "device": _device_name(device),
        "versions": _versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(Path(__file__).parent),
        "threads": _threads(),
    }


def _program() -> str:
    """The name of the command; `python -m rankone.cli` is the command too."""
    path = Path(sys.argv[0])
    return "rankone" if path == Path(__file__).with_name("cli.py") else path.name


def cpu_name() -> str:
    """Return the model of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown processor"


def cores() -> int:
    """Return how many cores this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def busy_seconds() -> float | None:
    """Processor time spent so far by all programs but this one, where the system tells (Linux)."""
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    user, nice, system = map(int, words[1:4])
    own = os.times()
    return (user + nice + system) / ticks - own.user - own.system


def installed_version(package: str) -> str | None:
    """Return the version of an installed package without importing it, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(torch.device(device))
    count = cores()
    return f"{cpu_name()}, {count} core{'' if count == 1 else 's'}"


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "rankone": rankone.__version__}
    for package in _PACKAGES:
        version = installed_version(package)
        if version is not None:
            versions[package] = version
    return versions


def _threads() -> int:
    # Whoever computed something has loaded torch; whoever has not should not wait for it here.
    torch = sys.modules.get("torch")
    return int(torch.get_num_threads()) if torch is not None else cores()


def _commit(folder: Path) -> str | None:
    if told := os.environ.get("RANKONE_COMMIT"):  # for files that travelled without their history
        return told
    # A copy installed inside another checkout is not tracked there: that commit says nothing.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--", ".")
    return f"{commit}-dirty" if changes else commit


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints, or None where there is no git, no checkout or no answer."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
