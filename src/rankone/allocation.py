"""Memory of large tensors on the CPU."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's mallopt
_HIGHEST = (2**30, 2**25)  # older versions of the library refuse more than 32 MiB


def keep_memory() -> bool:
    """Let this process keep the memory of tensors that are gone; whether that can be had here.

    The C library of Linux gives large blocks back to the system and asks for them again: new pages,
    which the system clears one by one. A training on the CPU, whose steps allocate the same tensors
    over and over, spends a third of its time in that. The cost is that the process stays as large
    as it once was.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    if mallopt(_TRIM_THRESHOLD, _HIGHEST[0]) != 1:
        return False
    return any(mallopt(_MMAP_THRESHOLD, size) == 1 for size in _HIGHEST)
