"""Nyströmformer: softmax attention approximated from landmarks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rankone.layers.base import Compact, Facts, Layer
from rankone.ops.low_rank import nystrom_attention


class Nystromformer(Layer):
    """F A⁺ B V, the Nyström approximation of softmax attention, plus a convolution of V.

    Landmarks are means of segments of real tokens, as equal as they can be; the pseudo-inverse
    begins from norms of each matrix alone. With no more tokens than landmarks it is softmax
    attention. Causal it cannot be: landmarks mix all tokens.

    Args:
        landmarks: M.
        iterations: of the pseudo-inverse.
        convolution: width of a depthwise convolution of the values over tokens, one filter a head,
            that is added to the output; odd, None for no convolution.

    Xiong et al. 2021, algorithm 1.
    """

    name = "nystromformer"
    facts = Facts(
        title="Nyströmformer",
        paper="Xiong et al. 2021",
        cost="T",
        state="-",
        exact="softmax attention up to M tokens (without convolution)",
    )

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        landmarks: int = 64,
        iterations: int = 6,
        convolution: int | None = 33,
        **options: Any,
    ) -> None:
        super().__init__(dim, heads, **options)
        if convolution is not None and (convolution < 1 or convolution % 2 == 0):
            raise ValueError(f"convolution must be odd or None, got {convolution}")
        self.landmarks, self.iterations = landmarks, iterations
        self.convolution: nn.Conv2d | None = None
        if convolution is not None:
            self.convolution = nn.Conv2d(
                heads,
                heads,
                (convolution, 1),
                padding=(convolution // 2, 0),
                groups=heads,
                bias=False,
            )

    def mix(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Landmarks of the real tokens, and the convolution of their values."""
        compact = Compact.of(x, mask)
        q, k, v = self.project(compact.x)
        if compact.mask is not None:
            v = v * compact.mask[..., None, None]
        output = nystrom_attention(
            q, k, v, landmarks=self.landmarks, iterations=self.iterations, lengths=compact.lengths
        )
        if self.convolution is not None:
            output = output + self.convolution(v.transpose(1, 2)).transpose(1, 2)
        return compact.restore(output)
