"""Softmax attention through a few projected keys, or a few landmarks."""

from rankone.ops.low_rank.nystrom import nystrom_attention, pseudo_inverse, segment_means
from rankone.ops.low_rank.projected import projected_attention

__all__ = ["nystrom_attention", "projected_attention", "pseudo_inverse", "segment_means"]
