"""Softmax attention to some of the keys: windows, shared keys, blocks."""

from rankone.ops.sparse_attention.blocks import Blocks, block_attention, random_blocks
from rankone.ops.sparse_attention.dense import attention
from rankone.ops.sparse_attention.window import window_attention

__all__ = ["Blocks", "attention", "block_attention", "random_blocks", "window_attention"]
