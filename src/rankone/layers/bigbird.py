"""BigBird: a window of blocks, the first and last block, and random blocks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rankone.layers.base import Compact, Facts, Layer
from rankone.ops.sparse_attention import block_attention


class BigBird(Layer):
    """Softmax attention to three blocks around a token, to the first and last, and to random ones.

    The first and last block of a sequence see everything. The random blocks are drawn once for a
    seed: the same in training and evaluation, whatever the batch. Causal it cannot be, nor has it a
    state: a last block is only there once all tokens are.

    Args:
        block: tokens of a block.
        random: random blocks that each block sees.
        seed: which ones; of its own for every layer of a model.
        impl: see `rankone.ops.sparse_attention.block_attention`.

    Zaheer et al. 2020, section 2 (internal transformer construction).
    """

    name = "bigbird"
    facts = Facts(
        title="BigBird",
        paper="Zaheer et al. 2020",
        cost="T",
        state="-",
        exact="softmax attention up to 4 + random blocks",
    )

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        block: int = 64,
        random: int = 3,
        seed: int = 0,
        impl: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(dim, heads, **options)
        if block < 1 or random < 0:
            raise ValueError(
                f"block must be at least 1 and random at least 0, got {block} and {random}"
            )
        self.block, self.random, self.seed, self.impl = block, random, seed, impl

    def mix(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Blocks of real tokens."""
        compact = Compact.of(x, mask)
        output = block_attention(
            *self.project(compact.x), block=self.block, random=self.random, seed=self.seed,
            lengths=compact.lengths, impl=self.impl,
        )  # fmt: skip
        return compact.restore(output)
