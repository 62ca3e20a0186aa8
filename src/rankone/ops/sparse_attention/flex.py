"""Windows and blocks by FlexAttention: one fused kernel that skips blocks of keys.

FlexAttention is told which blocks of keys each block of queries looks at, and which entries of
these count. It makes such lists itself from a mask of T × T entries; here they are written down
from the pattern, so that nothing of that size is ever there. Compiled it needs a GPU for gradients;
where it is not compiled it computes with a dense mask, and is for tests only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, no_type_check

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rankone.errors import BackendUnavailableError

IMPLEMENTATIONS = ("auto", "chunked", "flex")
SIDE = 128
"""Queries and keys of a block of FlexAttention, unless a pattern has blocks of its own."""
MOST_BLOCKS = 2048
"""Blocks of a sequence up to which random blocks are given to FlexAttention, as it wants a table of
blocks by blocks for them."""


def choose(impl: str, device: torch.device, *, dtype: torch.dtype, fits: bool = True) -> str:
    """chunked or flex; `auto` is chunked until flex has been measured to be faster.

    Raises ValueError for another name, and BackendUnavailableError where flex was asked for and
    cannot be.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if impl != "flex":
        return "chunked"
    missing = None
    if device.type != "cuda":
        missing = f"needs an NVIDIA GPU, got tensors on {device.type}"
    elif dtype == torch.float64:
        missing = "has no float64"
    elif not fits:
        missing = f"needs blocks of 32, 64 or 128 tokens, at most {MOST_BLOCKS} of them"
    if missing:
        raise BackendUnavailableError(
            f"impl='flex' {missing}; use 'chunked', which runs on any device"
        )
    return impl


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled


def attend(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B H T K"],
    v: Float[Tensor, "B H T V"],
    mask: Any,
    *,
    scale: float | None,
    with_sums: bool = False,
    side: int = SIDE,
) -> Any:
    """FlexAttention with a `BlockMask`; with its log of sums of exponentials if asked for."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    options: dict[str, Any] = {"block_mask": mask, "scale": scale}
    if with_sums:
        options["return_aux"] = AuxRequest(lse=True)
    if q.device.type != "cuda":
        found = flex_attention(q, k, v, **options)
    else:
        if side < SIDE:  # a kernel's blocks must divide those of the lists
            names = ("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")
            options["kernel_options"] = dict.fromkeys(names, side)
        found = _compiled()(q, k, v, **options)
    return (found[0], found[1].lse) if with_sums else found


def window_mask(
    T: int, *, window: int, causal: bool, seen: Bool[Tensor, "B T"] | None, device: torch.device
) -> Any:
    """A `BlockMask`: token i sees j if |i - j| <= window (j <= i if causal) and j is to be seen."""
    from torch.nn.attention.flex_attention import BlockMask

    @no_type_check  # it is compiled
    def inside(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = (i - j <= window) & (j - i <= (0 if causal else window))
        return near if seen is None else near & seen[b, j]

    number = -(-T // SIDE)
    back, ahead = window, 0 if causal else window
    keys = _strip(number, back, ahead, seen is None, device)
    queries = _strip(number, ahead, back, seen is None, device)
    return BlockMask((T, T), *keys, *queries, BLOCK_SIZE=(SIDE, SIDE), mask_mod=inside)


def _strip(
    number: int, back: int, ahead: int, some_full: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Lists of the blocks that hold tokens up to `back` before and `ahead` after those of each
    block: [1, 1, N] lengths and [1, 1, N, width], of blocks that are partly and wholly inside."""
    row = torch.arange(number, device=device)[:, None]
    step = torch.arange(-back // SIDE, -(-ahead // SIDE) + 1, device=device)
    block = row + step
    there = (block >= 0) & (block < number)
    # All of a block is inside if its farthest token is, seen from the farthest one of the other.
    whole = ((1 - step) * SIDE - 1 <= back) & ((1 + step) * SIDE - 1 <= ahead)
    if not some_full:
        return *_listed(block, there), None, None
    return *_listed(block, there & ~whole), *_listed(block, there & whole)


def _listed(block: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Those that are there first, and how many they are; with axes for batch and heads."""
    order = (~there).to(torch.int8).argsort(dim=-1, stable=True)
    found = torch.where(there, block, 0).gather(-1, order).to(torch.int32).contiguous()
    count = there.sum(-1, dtype=torch.int32)
    while count.dim() < 3:
        count, found = count[None], found[None]
    return count, found


def windows(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    *,
    window: int,
    causal: bool,
    seen: Bool[Tensor, "B T"] | None,
    shared: tuple[Float[Tensor, "B S H K"], Float[Tensor, "B S H V"]] | None,
    shared_seen: Bool[Tensor, "B S"] | None,
    scale: float | None,
) -> Float[Tensor, "B T H V"]:
    """`rankone.ops.sparse_attention.window_attention` without dilation.

    Shared keys have a softmax of their own, and the sums of both make the one softmax that is
    asked for.
    """
    mask = window_mask(q.shape[1], window=window, causal=causal, seen=seen, device=q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if shared is None:
        alone: Tensor = attend(q, k, v, mask, scale=scale)
        return alone.transpose(1, 2)
    near, near_sums = attend(q, k, v, mask, scale=scale, with_sums=True)
    far_k, far_v = (x.transpose(1, 2) for x in shared)
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ far_k.mT).to(dtype) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if shared_seen is not None:
        scores = scores.masked_fill(~shared_seen[:, None, None], -torch.inf)
    far_sums = scores.logsumexp(-1)
    weights = torch.exp(scores - _finite(far_sums)[..., None])
    far = weights.to(v.dtype) @ far_v
    near_sums = near_sums.to(dtype)
    share = torch.sigmoid(_finite(near_sums) - _finite(far_sums))
    share = torch.where(torch.isinf(near_sums), 0.0, share)
    share = torch.where(torch.isinf(far_sums), 1.0, share)[..., None].to(v.dtype)
    output: Tensor = share * near + (1 - share) * far
    return output.transpose(1, 2)


def _finite(x: Tensor) -> Tensor:
    """0 where nothing was summed."""
    return torch.where(torch.isinf(x), 0.0, x)


def strided(x: Tensor, step: int) -> Tensor:
    """[B, T, …] to [B · step, ⌈T / step⌉, …], tokens that are congruent modulo step together."""
    missing = -x.shape[1] % step
    x = torch.nn.functional.pad(x, (*[0, 0] * (x.dim() - 2), 0, missing))
    return torch.unflatten(x, 1, (-1, step)).movedim(2, 1).flatten(0, 1)


def together(x: Tensor, step: int, length: int) -> Tensor:
    """The inverse of `strided`, for sequences of a length."""
    return torch.unflatten(x, 0, (-1, step)).movedim(1, 2).flatten(1, 2)[:, :length]


def block_mask(
    T: int, table: Bool[Tensor, "B H N N"], lengths: Int[Tensor, " B"] | None, *, side: int
) -> Any:
    """A `BlockMask` of blocks that see blocks, and of tokens up to the lengths."""
    from torch.nn.attention.flex_attention import BlockMask

    @no_type_check  # it is compiled
    def inside(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = table[b if len(table) > 1 else 0, h, i // side, j // side]
        return seen if lengths is None else seen & (j < lengths[b])

    block = torch.arange(table.shape[-1], device=table.device).expand_as(table)
    keys, queries = _listed(block, table), _listed(block, table.mT)
    return BlockMask(
        (T, T), *keys, None, None, *queries, None, None, BLOCK_SIZE=(side, side), mask_mod=inside
    )
