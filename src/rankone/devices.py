"""Which device a command runs on."""

import torch


def pick_device(name: str) -> torch.device:
    """The device that "auto", "cpu" or "cuda" means here; ValueError if it is not there."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be one of auto, cpu, cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but torch sees no CUDA device here")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
