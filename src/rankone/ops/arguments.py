"""What the operations ask of their arguments, and what they say if it is not so.

Shapes, dtypes and devices are always checked. Values are looked at where that costs no
synchronisation, on the CPU, and once for each tensor of offsets; with RANKONE_CHECK=1 they are
looked at everywhere, NaN and infinity included. Inside `torch.compile` and while a CUDA graph is
captured values are not looked at.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


_seen_offsets: Any = WeakIdKeyDictionary()
"""Offsets on a device that were looked at → what they were checked for."""


class Sizes(NamedTuple):
    """The sizes of a call; `states` is the batch, or the number of packed sequences."""

    batch: int
    length: int
    heads: int
    keys: int
    values: int
    states: int


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """States and sums are in float32; float64 stays float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scalars: dict[str, Tensor | None],
    state: dict[str, Tensor | None],
    cu_seqlens: Tensor | None,
) -> Sizes:
    """Checks one call and returns its sizes.

    `scalars` have shape [B, T, H]; `state` holds the parts of the initial state by name: `kv`
    [N, H, K, V] and `z` [N, H, K].
    """
    if q.dim() != 4:
        raise ValueError(f"q must have shape [B, T, H, K], got {tuple(q.shape)}")
    batch, length, heads, keys = q.shape
    if min(q.shape) < 1:
        raise ValueError(f"q must have no empty axis, got shape [B, T, H, K] = {tuple(q.shape)}")
    _check_shape("k", k, "[B, T, H, K]", (batch, length, heads, keys))
    if v.dim() != 4 or v.shape[:3] != q.shape[:3] or v.shape[3] < 1:
        raise ValueError(
            f"v must have shape [B, T, H, V] = ({batch}, {length}, {heads}, V >= 1), "
            f"got {tuple(v.shape)}"
        )
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be one of {', '.join(map(str, DTYPES))}, got {q.dtype}")
    states = batch
    if cu_seqlens is not None:
        states = _check_offsets(cu_seqlens, batch, q.device)
    sizes = Sizes(batch, length, heads, keys, v.shape[3], states)
    shapes = {
        "kv": ("[N, H, K, V]", (states, heads, keys, sizes.values)),
        "z": ("[N, H, K]", (states, heads, keys)),
    }
    for name, tensor in {"k": k, "v": v}.items():
        _check_alike(name, tensor, q, (q.dtype,))
    for name, scalar in scalars.items():
        if scalar is not None:
            _check_shape(name, scalar, "[B, T, H]", (batch, length, heads))
            _check_alike(name, scalar, q, DTYPES)
    for name, part in state.items():
        if part is not None:
            _check_shape(f"initial_state ({name})", part, *shapes[name])
            _check_alike(f"initial_state ({name})", part, q, (state_dtype(q.dtype),))
    _check_values({"q": q, "k": k, "v": v, **scalars, **state}, scalars, cu_seqlens, length)
    return sizes


def _check_shape(name: str, tensor: Tensor, letters: str, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {letters} = {shape}, got {tuple(tensor.shape)}")


def _check_alike(name: str, tensor: Tensor, q: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")
    if tensor.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise ValueError(f"{name} must be {expected} where q is {q.dtype}, got {tensor.dtype}")


def _check_offsets(cu_seqlens: Tensor, batch: int, device: torch.device) -> int:
    """Shape and dtype of the offsets of packed sequences; how many sequences there are."""
    if batch != 1:
        raise ValueError(f"cu_seqlens packs sequences into one row: B must be 1, got {batch}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens must have shape [N+1] with N >= 1, got {tuple(cu_seqlens.shape)}"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens must be on {device}, got {cu_seqlens.device}")
    return len(cu_seqlens) - 1


def _check_values(
    tensors: dict[str, Tensor | None],
    scalars: dict[str, Tensor | None],
    cu_seqlens: Tensor | None,
    length: int,
) -> None:
    if torch.compiler.is_compiling():
        return
    everywhere = os.environ.get("RANKONE_CHECK") == "1"
    decay = scalars.get("decay")
    if decay is not None and (everywhere or decay.device.type == "cpu") and bool((decay > 0).any()):
        raise ValueError(f"decay is in log space and must be <= 0, got {float(decay.max())}")
    if cu_seqlens is not None:
        _check_offset_values(cu_seqlens, length, everywhere)
    if everywhere:
        for name, tensor in tensors.items():
            if tensor is not None and not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} must be finite, got a NaN or an infinite entry")


def _check_offset_values(cu_seqlens: Tensor, length: int, everywhere: bool) -> None:
    """Looks at the offsets; on a GPU only if they are new or were changed, for it must be waited
    for."""
    on_cpu = cu_seqlens.device.type == "cpu"
    version = 0 if cu_seqlens.is_inference() else cu_seqlens._version
    if not on_cpu and not everywhere and _seen_offsets.get(cu_seqlens) == (version, length):
        return
    capturing = cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or cu_seqlens.is_meta:
        return
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != length or sorted(offsets) != offsets:
        raise ValueError(
            f"cu_seqlens must rise from 0 to T = {length} and never fall, got {offsets}"
        )
    if not on_cpu:
        _seen_offsets[cu_seqlens] = (version, length)
