"""What every mechanism must satisfy, as functions of a layer; the tests call them by name.

A case is a name, whether it is causal, and options that make it small enough to show all its parts
in some tens of tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankone.layers import Layer, build

DIM, HEADS = 12, 3


class Case(NamedTuple):
    """A layer to be built."""

    name: str
    causal: bool
    options: dict[str, Any]

    def layer(self, dtype: torch.dtype = torch.float64, **more: Any) -> Layer:
        """The layer, with weights that do not depend on anything else."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            options = self.options | more
            return build(self.name, dim=DIM, heads=HEADS, causal=self.causal, **options).to(dtype)

    def __str__(self) -> str:
        options = "".join(f"-{k}={v}" for k, v in self.options.items())
        return f"{self.name}{'-causal' if self.causal else ''}{options}"


CASES = [
    Case("softmax", False, {}),
    Case("softmax", True, {}),
    Case("linear", False, {}),
    Case("linear", True, {}),
    Case("performer", False, {"features": 10}),
    Case("performer", True, {"features": 10}),
    Case("performer", True, {"features": 10, "kernel": "relu"}),
    Case("rfa", False, {"features": 10}),
    Case("rfa", True, {"features": 10}),
    Case("rfa", True, {"features": 10, "gate": True}),
    Case("linformer", False, {"rank": 5, "max_length": 200}),
    Case("linformer", False, {"rank": 5, "max_length": 200, "share": "none"}),
    Case("nystromformer", False, {"landmarks": 6, "convolution": 5}),
    Case("longformer", False, {"window": 4}),
    Case("longformer", False, {"window": 3, "dilation": (1, 2, 3), "global_tokens": 2}),
    Case("longformer", True, {"window": 4}),
    Case("longformer", True, {"window": 3, "dilation": (1, 2, 3)}),
    Case("bigbird", False, {"block": 4, "random": 2}),
    Case("long_short", False, {"rank": 3, "window": 4}),
    Case("long_short", True, {"rank": 2, "window": 5, "chunk": 4}),
]
STREAMS = [case for case in CASES if case.causal]


def sample(batch: int, length: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Inputs [B, T, D]."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, DIM, generator=g, dtype=torch.float64).to(dtype)


def padding_changes_nothing(case: Case, where: str, *, length: int = 37, more: int = 14) -> None:
    """Real tokens get what they get alone, wherever padding is and whatever it holds."""
    layer, x = case.layer(), sample(2, length)
    alone = layer(x)
    total = length + more
    places = {
        "after": torch.arange(length),
        "before": torch.arange(more, total),
        "around": torch.arange(5, 5 + length),
        "between": torch.randperm(total, generator=torch.Generator().manual_seed(1))[:length]
        .sort()
        .values,
    }[where]
    padded = torch.full((2, total, DIM), torch.nan, dtype=x.dtype)
    padded[:, places] = x
    mask = torch.zeros(2, total, dtype=torch.bool)
    mask[:, places] = True
    got = layer(padded, mask=mask)
    close(got[:, places], alone)
    assert not got[~mask].any()


def neighbours_change_nothing(case: Case) -> None:
    """A sequence gets the same in any batch, shorter ones with their padding."""
    layer, x = case.layer(), sample(3, 41)
    lengths = torch.tensor([41, 17, 1])
    mask = torch.arange(41) < lengths[:, None]
    together = layer(x, mask=mask)
    for row, length in zip(range(3), lengths.tolist(), strict=True):
        close(together[row : row + 1, :length], layer(x[row : row + 1, :length]))


def the_future_changes_nothing(case: Case) -> None:
    """Outputs up to a token are the same to the bit, whatever comes after."""
    layer, x = case.layer(), sample(2, 45)
    for kept in (1, 20, 44):
        other = torch.cat([x[:, :kept], sample(2, 45 - kept, seed=1)], dim=1)
        assert torch.equal(layer(x)[:, :kept], layer(other)[:, :kept])


def a_split_is_the_whole(case: Case, cuts: tuple[int, ...]) -> None:
    """A sequence in parts, with the state handed on, gives what it gives at once."""
    layer, x = case.layer(), sample(2, 43)
    whole = layer(x)
    state, parts = None, []
    for begin, end in zip((0, *cuts), (*cuts, 43), strict=True):
        y, state = layer(x[:, begin:end], state=state, return_state=True)
        parts.append(y)
    close(torch.cat(parts, dim=1), whole)
    close(layer(x[:, cuts[-1] :], state=_until(layer, x, cuts[-1])), whole[:, cuts[-1] :])


def _until(layer: Layer, x: Tensor, cut: int) -> Any:
    return layer(x[:, :cut], return_state=True)[1]


def gradients_are_finite_differences(case: Case) -> None:
    """Of the input and of every weight."""
    layer, x = case.layer(), sample(1, 9)
    weights = {name: p for name, p in layer.named_parameters() if p.numel()}

    def call(x: Tensor, *given: Tensor) -> Tensor:
        named = dict(zip(weights, given, strict=True))
        return torch.func.functional_call(layer, named, (x,))

    leaves = [x, *(p.detach() for p in weights.values())]
    for leaf in leaves:
        leaf.requires_grad_()
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def close(got: Tensor, want: Tensor, tolerance: float = 1e-9) -> None:
    """Relative to the size of what is wanted."""
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
