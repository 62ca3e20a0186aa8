"""Which implementation runs, and why."""

from __future__ import annotations

import torch

from rankone.errors import BackendUnavailableError

IMPLEMENTATIONS = ("auto", "reference", "chunked", "triton")


def choose(impl: str, device: torch.device) -> tuple[str, str]:
    """The implementation that `impl` means on a device, and why.

    A named implementation never falls back: it is there, or BackendUnavailableError says what is
    missing.

    >>> choose("auto", torch.device("cpu"))
    ('chunked', 'matrix products over chunks, on any device')
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if impl == "triton":
        raise BackendUnavailableError(
            "impl='triton' is not part of this version; use 'chunked', which runs on any device"
        )
    if impl == "auto":
        return "chunked", "matrix products over chunks, on any device"
    return impl, "asked for"
