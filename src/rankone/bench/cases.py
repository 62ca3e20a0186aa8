"""What is measured: shapes, dtypes, implementations, and the inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankone.bench.clock import Effort

Record = dict[str, Any]

OPS = ("linear_attention", "delta_rule")
PASSES = ("forward", "forward_backward")
OURS = ("triton", "chunked")
PEERS = ("fla", "sdpa", "sdpa_cudnn", "transformers")
SOFTMAX = ("sdpa", "sdpa_cudnn")
"""Peers that are softmax attention: another function, of quadratic cost and without decay."""


class Shape(NamedTuple):
    """The sizes of a call."""

    B: int
    T: int
    H: int
    K: int
    V: int


@dataclass(frozen=True)
class Plan:
    """One kind of run; every operation is measured at every shape, with and without decay."""

    dtype: torch.dtype
    shapes: tuple[Shape, ...]
    impls: tuple[str, ...]
    """Ours and the peers, by name."""
    only_at: tuple[tuple[str, Shape], ...] = ()
    """Implementations that are measured at these shapes alone."""
    longest_attention: int = 2**17
    """Softmax attention is left out beyond this length."""
    longest_compared_peer: int = 2**17
    """Up to this length peers are compared in full shape; beyond it in the small one only."""
    compared: int = 512
    """Length at which every implementation is compared with the definition."""
    pass_seconds: float = 20.0
    """An implementation is left out where one pass is expected to take longer than this."""
    copied: int = 2**30
    """Bytes of the copy that measures bandwidth."""
    effort: Effort = field(default_factory=lambda: Effort(warm_up=(1, 0.05)))


_MAIN = tuple(
    Shape(*rows, 16, 128, 128) for rows in ((16, 2048), (4, 8192), (1, 32768), (1, 131072))
)
_SHORT = tuple(Shape(8, length, 16, 128, 128) for length in (128, 256, 512, 1024))

GPU = Plan(
    dtype=torch.bfloat16,
    shapes=_MAIN + _SHORT,
    impls=("triton", "chunked", "fla", "sdpa", "sdpa_cudnn"),
    only_at=(("chunked", _MAIN[0]),),
    longest_attention=32768,
    effort=Effort(rounds=(11, 11)),
)
"""Lengths at one number of tokens, a longer one, and short ones."""

CPU = Plan(
    dtype=torch.float32,
    shapes=tuple(Shape(1, 2**n, 8, 64, 64) for n in range(9, 17)),
    impls=("chunked", "sdpa", "transformers"),
    longest_compared_peer=4096,
)
"""One sequence, longer and longer."""

QUICK_GPU = Plan(
    dtype=torch.bfloat16,
    shapes=(Shape(2, 512, 4, 64, 64), Shape(2, 2048, 4, 64, 64)),
    impls=("triton", "chunked", "fla", "sdpa", "sdpa_cudnn"),
    compared=128,
    effort=Effort(rounds=(3, 3), warm_up=(2, 0.01), round_ms=2.0),
)
"""A look, not a measurement."""

QUICK_CPU = Plan(
    dtype=torch.float32,
    shapes=(Shape(1, 256, 2, 32, 32), Shape(1, 1024, 2, 32, 32)),
    impls=("chunked", "sdpa", "transformers"),
    compared=128,
    copied=2**26,
    effort=Effort(rounds=(3, 3), seconds=1.0, warm_up=(1, 0.0)),
)
"""A look, not a measurement."""


@dataclass(frozen=True)
class Case:
    """One operation at one shape."""

    op: str
    shape: Shape
    dtype: torch.dtype
    device: torch.device

    def facts(self, decay: bool) -> Record:
        """What names the case in a record."""
        return {
            "op": self.op,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
            **self.shape._asdict(),
            "decay": decay,
        }

    def inputs(self, *, decay: bool, seed: int = 0) -> dict[str, Tensor]:
        """q, k, v, for the delta rule beta, with `decay` decay; and d_o, a gradient of the output.

        Keys have length 1, beta is between 0 and 1 and decay, in float32, between -0.1 and 0, as
        trained models have them. q, k, v, beta and d_o do not depend on `decay`.
        """
        B, T, H, K, V = self.shape
        g = torch.Generator(self.device).manual_seed(seed)

        def draw(kind: str, *size: int) -> Tensor:
            make = torch.randn if kind == "normal" else torch.rand
            return make(*size, generator=g, device=self.device)

        q, k, v = draw("normal", B, T, H, K), draw("normal", B, T, H, K), draw("normal", B, T, H, V)
        found = {"q": q, "k": torch.nn.functional.normalize(k, dim=-1), "v": v}
        found["d_o"] = draw("normal", B, T, H, V)
        beta, fading = draw("uniform", B, T, H), -0.1 * draw("uniform", B, T, H)
        if self.op == "delta_rule":
            found["beta"] = beta
        found = {name: x.to(self.dtype) for name, x in found.items()}
        return found | {"decay": fading} if decay else found
