"""What this machine offers, what is installed, and what `auto` would choose here and why."""

from __future__ import annotations

import os
import platform
from itertools import groupby
from typing import NamedTuple

import numba
import torch
from rich.console import Console
from rich.table import Table

import rankone
from rankone.provenance import cores, cpu_name, installed_version

__all__ = ["Finding", "doctor", "examine"]

# What a missing package would be needed for.
_PACKAGES = {
    "numpy": "arrays",
    "numba": "fast gradients on the CPU",
    "safetensors": "checkpoints",
    "matplotlib": "figures",
    "rich": "tables and progress",
    "tyro": "the command line",
    "jaxtyping": "shapes in signatures",
    "triton": "fast gradients on the GPU",
    "transformers": "models of other libraries",
    "scikit-learn": "tests",
    "scipy": "tests",
}
_DIM = 10  # the number of features in the paper


class Finding(NamedTuple):
    """One line of the examination."""

    section: str
    name: str
    value: str


def doctor() -> None:
    """Print the examination: tables in a terminal, one line a finding where it is piped."""
    console = Console()
    findings = examine()
    if not console.is_terminal:
        for finding in findings:
            print(f"{finding.section}: {finding.name}: {finding.value}")
        return
    for section, rows in groupby(findings, key=lambda finding: finding.section):
        table = Table(title=section, title_justify="left", show_header=False, min_width=60)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for row in rows:
            table.add_row(row.name, row.value)
        console.print(table)


def examine() -> list[Finding]:
    """Return all findings, section by section."""
    return [*_versions(), *_devices(), *_threads(), *_installed(), *_choices()]


def _versions() -> list[Finding]:
    return [
        Finding("versions", "rankone", rankone.__version__),
        Finding("versions", "python", f"{platform.python_version()} on {platform.platform()}"),
        Finding("versions", "torch", str(torch.__version__)),
    ]


def _devices() -> list[Finding]:
    findings = [Finding("devices", "cpu", f"{cpu_name()}, {cores()} cores, {_memory()}")]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        value = f"{gpu.name}, {memory}, capability {gpu.major}.{gpu.minor}"
        findings.append(Finding("devices", f"cuda:{index}", value))
    if len(findings) == 1:
        findings.append(Finding("devices", "cuda", "none that torch can use"))
    return findings


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return "memory unknown"
    return f"{size / 2**30:.0f} GiB"


def _threads() -> list[Finding]:
    return [
        Finding("threads", "torch", str(torch.get_num_threads())),
        Finding("threads", "numba", str(numba.get_num_threads())),
    ]


def _installed() -> list[Finding]:
    return [
        Finding("installed", name, installed_version(name) or f"no (for {purpose})")
        for name, purpose in _PACKAGES.items()
    ]


def _choices() -> list[Finding]:
    from rankone import ops
    from rankone.icl.gradients import choose

    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    findings = []
    for device in devices:
        name, reason = choose("auto", device, _DIM)
        findings.append(Finding("choices", f"gradients on {device}", f"{name}: {reason}"))
        name, reason = ops.choose("auto", device)
        findings.append(Finding("choices", f"ops on {device}", f"{name}: {reason}"))
    return findings
