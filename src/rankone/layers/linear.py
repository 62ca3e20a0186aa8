"""The Linear Transformer: elu + 1 in place of the exponential."""

from __future__ import annotations

from torch import Tensor

from rankone.layers.base import Facts
from rankone.layers.features import FeatureLayer
from rankone.ops import feature_maps


class Linear(FeatureLayer):
    """Attention with φ(x) = elu(x) + 1 on queries and keys.

    Katharopoulos et al. 2020, equations 5 to 7 and 9 to 12.
    """

    name = "linear"
    facts = Facts(
        title="Linear Transformer",
        paper="Katharopoulos et al. 2020",
        cost="T",
        state="K V + K a head",
        exact="its own kernel; parallel = recurrent",
        causal=True,
        streams=True,
        cross=True,
    )

    def features(self, x: Tensor, *, query: bool) -> Tensor:
        """elu(x) + 1."""
        return feature_maps.elu_plus_one(x)
