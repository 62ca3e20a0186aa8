"""Functions on tensors: one recurrence, several ways to compute it.

    S_t = e^decay_t (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ,      o_t = scale · S_tᵀ q_t

`linear_attention` is the recurrence without the erasure (beta only in v), `delta_rule` the whole
of it. Layout is [B, T, H, K] everywhere, the state is [B, H, K, V] in float32.
"""

from rankone.ops import feature_maps
from rankone.ops.delta_rule import DeltaRule, delta_rule, delta_rule_step
from rankone.ops.dispatch import IMPLEMENTATIONS, choose
from rankone.ops.linear_attention import (
    LinearAttention,
    NormalizedState,
    linear_attention,
    linear_attention_step,
)

__all__ = [
    "IMPLEMENTATIONS",
    "DeltaRule",
    "LinearAttention",
    "NormalizedState",
    "choose",
    "delta_rule",
    "delta_rule_step",
    "feature_maps",
    "linear_attention",
    "linear_attention_step",
]
