"""Linear attention: an exact sum over the past (or over everything), at linear cost."""

from rankone.ops.linear_attention.api import (
    LinearAttention,
    NormalizedState,
    linear_attention,
    linear_attention_step,
)

__all__ = ["LinearAttention", "NormalizedState", "linear_attention", "linear_attention_step"]
