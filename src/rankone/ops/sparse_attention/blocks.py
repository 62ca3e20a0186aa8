"""Attention by blocks: a window, the first and the last block, and some random ones.

Queries of a block see the keys of the block and of its two neighbours, of the first and the last
block of their sequence, and of some blocks that are drawn at random; the first and the last block
see everything. Keys are gathered block by block, so that time and memory are linear in T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rankone.ops.sparse_attention import flex
from rankone.ops.sparse_attention.dense import attention

_TRIES = 32
"""Draws from a large pool, of which the first different ones count; smaller pools are shuffled."""
_FIXED = 5
"""First and last block, and the window of three."""


class Blocks(NamedTuple):
    """Which blocks the queries of each block see: [B, H, N, slots]."""

    which: Int[Tensor, "B H N slots"]
    there: Bool[Tensor, "B H N slots"]
    """False for slots that are empty or hold what another slot holds."""


def random_blocks(
    number: Int[Tensor, " B"], most: int, heads: int, *, random: int, seed: int
) -> Blocks:
    """`random` different blocks for every block of sequences with `number` blocks of `most`.

    Neither the first nor the last block is drawn, nor a neighbour, nor the block itself. Which
    ones are drawn depends on the seed, the head, the block and the number of blocks and on nothing
    else: the same for all batches, devices and passes.

    >>> random_blocks(torch.tensor([9]), 9, 1, random=2, seed=0).which[0, 0, 4]
    tensor([7, 1])
    """
    row = torch.arange(most, device=number.device)
    last = number[:, None, None] - 1  # [B, H, N] from here on
    low = (row - 1).clamp_min(1)
    high = torch.minimum(row + 1, last - 1)
    near = (high - low + 1).clamp_min(0)
    pool = (last - 1 - near).clamp_min(0)
    head = torch.arange(heads, device=number.device)[:, None]
    key = _mix(_mix(_mix(torch.full_like(last, seed)) + head) + row)  # [B, H, N]
    tries = torch.arange(_TRIES, device=number.device)
    hashes = _mix(key[..., None] + tries) & 0x7FFFFFFF
    drawn = hashes % pool[..., None].clamp_min(1)
    first = ~(drawn[..., :, None] == drawn[..., None, :]).tril(-1).any(-1)
    among_many = _first_of(drawn, first, random)
    shuffled = torch.where(tries < pool[..., None], hashes, 1 << 40).argsort(-1)[..., :random]
    place = torch.where(pool[..., None] > _TRIES, among_many, shuffled)
    slot = torch.arange(random, device=number.device)
    there = (slot < pool[..., None]) & (row[:, None] < number[:, None, None, None])
    # Places of the pool are blocks 1, 2, … without the neighbours.
    block = 1 + place + torch.where(1 + place >= low[:, None], near[..., None], 0)
    return Blocks(torch.where(there, block, 0), there.expand_as(block))


def _first_of(x: Tensor, chosen: Tensor, count: int) -> Tensor:
    """The first `count` chosen entries of each row."""
    order = torch.where(chosen, torch.arange(x.shape[-1], device=x.device), x.shape[-1])
    return x.gather(-1, order.argsort(-1)[..., :count])


def _mix(x: Tensor) -> Tensor:
    """A whole number that looks random, for each whole number (Steele et al. 2014)."""
    x = (x + 0x1E3779B97F4A7C15) * 0x3F58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x14D049BB133111EB
    return x ^ (x >> 31)


def block_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    *,
    block: int,
    random: int = 3,
    seed: int = 0,
    lengths: Int[Tensor, " B"] | None = None,
    drawn: Int[Tensor, "H N R"] | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Float[Tensor, "B T H V"]:
    """Softmax attention to a window of blocks, the first and last block, and random blocks.

    Args:
        block: tokens of a block.
        random: random blocks that each block sees.
        seed: which ones; see `random_blocks`.
        lengths: tokens of each sequence; the rest is padding, whose outputs are 0. The last block
            is that of the sequence, so that padding changes nothing.
        drawn: the random blocks of all heads and blocks, instead of those of the seed.
        scale: K^-0.5 by default.
        impl: auto, chunked (any device) or flex (FlexAttention, on a GPU).

    Cost: time O(T (5 + random) block (K + V)).

    Zaheer et al. 2020, section 2.
    """
    if block < 1 or random < 0:
        raise ValueError(f"block must be at least 1 and random at least 0, got {block}, {random}")
    B, T, H, _ = q.shape
    most = -(-T // block)
    fits = block in (32, 64, 128) and most <= flex.MOST_BLOCKS
    fused = flex.choose(impl, q.device, dtype=q.dtype, fits=fits) == "flex"
    if lengths is None:
        lengths = torch.full((B,), T, device=q.device)
    number = ((lengths + block - 1) // block).clamp_min(1)
    missing = most * block - T
    if missing:
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing)) for x in (q, k, v))
    there = torch.arange(most * block, device=q.device) < lengths[:, None]  # [B, N C]
    q, k, v = (x.movedim(2, 1) for x in (q, k, v))  # [B, H, N C, …]
    if drawn is None:
        extra = random_blocks(number, most, H, random=random, seed=seed)
    else:
        index = drawn.to(q.device).expand(B, *drawn.shape)
        extra = Blocks(index, torch.ones_like(index, dtype=torch.bool))
    seen = _all_slots(number, most, extra)
    if fused:
        mask = flex.block_mask(most * block, _table(seen, number), lengths, side=block)
        fused_output: Tensor = flex.attend(q, k, v, mask, scale=scale, side=block)
        return fused_output.movedim(1, 2)[:, :T] * there[:, :T, None, None]
    rows = torch.unflatten(q, 2, (most, block)).flatten(0, 2)[:, None]  # [B H N, 1, C, K]
    keys, values = (_gather(x, seen.which, block) for x in (k, v))
    inside = torch.unflatten(there, 1, (most, block))[:, None].expand(-1, H, -1, -1)
    inside = inside.gather(2, seen.which.flatten(2)[..., None].expand(-1, -1, -1, block))
    inside = torch.unflatten(inside, 2, seen.which.shape[2:]) & seen.there[..., None]
    inside = inside.flatten(3).flatten(0, 2)[:, None, None]  # [B H N, 1, 1, slots C]
    inside = inside.expand(-1, -1, block, -1)
    output = attention(rows, keys, values, seen=inside, scale=scale)
    output = output[:, 0].view(B, H, most, block, -1)
    output = _with_global_rows(output, q, k, v, number, there, scale)
    output = output.flatten(2, 3).movedim(1, 2)[:, :T]
    return output * there[:, :T, None, None]


def _all_slots(number: Tensor, most: int, extra: Blocks) -> Blocks:
    """First, last, window and drawn blocks of every block."""
    H = extra.which.shape[1]
    row = torch.arange(most, device=number.device)
    last = (number - 1)[:, None]
    zeros = torch.zeros_like(row).expand(len(number), -1)
    near = [(row + step).expand(len(number), -1) for step in (-1, 0, 1)]
    index = torch.stack([zeros, last.expand(-1, most), *near], dim=-1)
    there = torch.ones_like(index, dtype=torch.bool)
    there[..., 1] = last > 0
    for n in range(2, _FIXED):  # in the window if it is not there already
        block = index[..., n]
        there[..., n] = (block > 0) & (block < last)
    index = index.clamp(0, most - 1)[:, None].expand(-1, H, -1, -1)
    there = there[:, None].expand(-1, H, -1, -1)
    pairs = zip((index, there), extra, strict=True)
    return Blocks(*(torch.cat(pair, dim=-1) for pair in pairs))


def _table(seen: Blocks, number: Tensor) -> Tensor:
    """[B, H, N, N]: whether a block sees another, the first and the last one all."""
    most = seen.which.shape[2]
    table = torch.zeros(*seen.which.shape[:2], most, most, dtype=torch.int8, device=number.device)
    table = table.scatter_add(-1, seen.which, seen.there.to(torch.int8)) > 0
    block = torch.arange(most, device=number.device)
    last = (number - 1)[:, None]
    whole = ((block == 0) | (block == last))[:, None, :, None]
    return (table | whole) & (block <= last)[:, None, None]


def _gather(x: Tensor, index: Tensor, block: int) -> Tensor:
    """The rows of blocks: [B, H, N C, K] and [B, H, N, slots] to [B H N, 1, slots C, K]."""
    B, H, N, slots = index.shape
    blocks = x.reshape(B, H, N, -1)  # [B, H, N, C K]
    found = blocks.gather(2, index.flatten(2)[..., None].expand(-1, -1, -1, blocks.shape[3]))
    return found.view(B * H * N, 1, slots * block, -1)


def _with_global_rows(
    output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    number: Tensor,
    there: Tensor,
    scale: float | None,
) -> Tensor:
    """The outputs [B, H, N, C, V] with those of the first and the last block, which see all."""
    _, H, most, block, _ = output.shape
    last = (number - 1).view(-1, 1, 1, 1, 1)
    rows = torch.unflatten(q, 2, (most, block))
    at = last.expand(-1, H, -1, block, rows.shape[4])
    whole = torch.cat([rows[:, :, 0], rows.gather(2, at)[:, :, 0]], dim=2)
    found = attention(whole, k, v, seen=there[:, None, None], scale=scale)
    first, final = found[:, :, None, :block], found[:, :, None, block:]
    row = torch.arange(most, device=q.device).view(-1, 1, 1)
    output = torch.where(row == last, final, output)
    return torch.where(row == 0, first, output)
