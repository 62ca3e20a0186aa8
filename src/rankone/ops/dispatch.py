"""Which implementation runs, and why."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

from rankone.errors import BackendUnavailableError

IMPLEMENTATIONS = ("auto", "reference", "chunked", "triton")

MOST_KEYS = 256
"""K up to which the fused kernels hold a state on the chip."""


def choose(
    impl: str, device: torch.device, *, dtype: torch.dtype = torch.float32, keys: int = 1
) -> tuple[str, str]:
    """The implementation that `impl` means for a device, a dtype of inputs and K, and why.

    A named implementation never falls back: it is there, or BackendUnavailableError says what is
    missing.

    >>> choose("reference", torch.device("cpu"))
    ('reference', 'asked for')
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if impl not in ("auto", "triton"):
        return impl, "asked for"
    missing = _missing_for_triton(device, dtype, keys)
    if impl == "triton":
        if missing:
            raise BackendUnavailableError(
                f"impl='triton' {missing}; use 'chunked', which runs on any device"
            )
        return impl, "asked for"
    if device.type == "cuda" and not missing:
        return "triton", "fused kernels"
    if walks(device):
        return "chunked", "compiled code that walks, the state in cache"
    return "chunked", "matrix products over chunks, on any device"


def walks(device: torch.device) -> bool:
    """Whether the form in chunks is compiled code on a device: on the CPU, where one core of it is
    faster than products are on several."""
    return device.type == "cpu"


def _missing_for_triton(device: torch.device, dtype: torch.dtype, keys: int) -> str | None:
    """What the fused kernels lack for a call, None if nothing."""
    if dtype == torch.float64:
        return "computes in float32 and has no float64"
    if keys > MOST_KEYS:
        return f"holds a state on the chip and needs K <= {MOST_KEYS}, got {keys}"
    if not _has_triton():
        return "needs the package triton (pip install 'rankone[triton]')"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (8, 0):
            return f"needs a GPU of compute capability 8.0 or more, got {major}.{minor}"
        return None
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"needs an NVIDIA GPU (or TRITON_INTERPRET=1, which is slow), got device {device}"


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
