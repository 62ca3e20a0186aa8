"""Every implementation by one name and one way to be called, ours and the peers alike.

For a peer that is not installed, or does not do what is asked, `AbsentError` says why. Nothing here
reaches for the network.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rankone import ops
from rankone.bench.cases import OURS, Case
from rankone.errors import BackendUnavailableError
from rankone.ops import choose
from rankone.provenance import installed_version

Tensors = dict[str, Tensor]

PACKAGES = {"fla": "flash-linear-attention", "transformers": "transformers"}
"""Peer → the package it is in."""


class AbsentError(Exception):
    """An implementation is not measured; the message says why."""


@dataclass(frozen=True)
class Implementation:
    """A function of the inputs by name.

    `leaves` names those that gradients are taken of; `layout` brings the inputs into the form that
    the function wants, outside of the clock.
    """

    name: str
    function: Callable[[Tensors], Tensor]
    leaves: tuple[str, ...]
    layout: Callable[[Tensors], Tensors] = dict

    @property
    def ours(self) -> bool:
        """Whether it is one of ours."""
        return self.name in OURS


@dataclass(frozen=True)
class Bound:
    """An implementation with its inputs, in its own layout."""

    implementation: Implementation
    tensors: Tensors

    def forward(self) -> Tensor:
        """The output, without what a backward would need."""
        with torch.no_grad():
            return self.implementation.function(self.tensors)

    def forward_backward(self) -> tuple[Tensor, ...]:
        """The output and the gradients of its product with d_o, in the order of the leaves."""
        leaves = [self.tensors[name] for name in self.implementation.leaves]
        output = self.implementation.function(self.tensors)
        return (output.detach(), *torch.autograd.grad(output, leaves, self.tensors["d_o"]))

    def passes(self) -> dict[str, Callable[[], object]]:
        """The two passes by name."""
        return {"forward": self.forward, "forward_backward": self.forward_backward}


def bind(implementation: Implementation, inputs: Tensors) -> Bound:
    """The implementation with its inputs laid out and marked for gradients."""
    tensors = {name: x.detach() for name, x in implementation.layout(inputs).items()}
    for name in implementation.leaves:
        tensors[name] = tensors[name].requires_grad_()
    return Bound(implementation, tensors)


def find(name: str, case: Case, *, decay: bool) -> Implementation:
    """The implementation called `name` for a case; raises `AbsentError`."""
    if name in OURS:
        return _ours(name, case, decay)
    peers = {"fla": _fla, "sdpa": _sdpa, "sdpa_cudnn": _cudnn, "transformers": _transformers}
    return peers[name](case, decay)


def versions() -> dict[str, str]:
    """Versions of the peers that are installed."""
    found = {package: installed_version(package) for package in PACKAGES.values()}
    return {package: version for package, version in found.items() if version is not None}


@contextmanager
def flash_attention(device: torch.device) -> Iterator[None]:
    """On a GPU `scaled_dot_product_attention` is the flash kernel; cuDNN's is a peer of its own."""
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield


def _leaves(case: Case, decay: bool) -> tuple[str, ...]:
    beta = ("beta",) if case.op == "delta_rule" else ()
    return ("q", "k", "v", *beta, *(("decay",) if decay else ()))


def _ours(name: str, case: Case, decay: bool) -> Implementation:
    try:
        choose(name, case.device)
    except BackendUnavailableError as error:
        raise AbsentError(str(error)) from error

    def linear(x: Tensors) -> Tensor:
        call = ops.linear_attention(x["q"], x["k"], x["v"], decay=x.get("decay"), impl=name)
        return call.output

    def delta(x: Tensors) -> Tensor:
        call = (x["q"], x["k"], x["v"], x["beta"])
        return ops.delta_rule(*call, decay=x.get("decay"), impl=name).output

    function = delta if case.op == "delta_rule" else linear
    return Implementation(name, function, _leaves(case, decay))


def _fla(case: Case, decay: bool) -> Implementation:
    if case.device.type != "cuda":
        raise AbsentError("its kernels need a GPU")
    if decay:
        raise AbsentError(
            "its kernels with decay are not run: on Hopper they refuse their backward with Triton "
            "3.4 to 3.7.0, whose results it says are wrong, and their first call tunes for minutes"
        )
    chunk_linear_attn, chunk_delta_rule = _load("fla", _load_fla)

    def linear(x: Tensors) -> Tensor:
        output: Tensor = chunk_linear_attn(x["q"], x["k"], x["v"], normalize=False)[0]
        return output

    def delta(x: Tensors) -> Tensor:
        output: Tensor = chunk_delta_rule(x["q"], x["k"], x["v"], x["beta"])[0]
        return output

    function = delta if case.op == "delta_rule" else linear
    return Implementation("fla", function, _leaves(case, decay))


def _sdpa(case: Case, decay: bool) -> Implementation:
    def attention(x: Tensors) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            x["q"], x["k"], x["v"], is_causal=True
        )

    return _softmax("sdpa", attention, decay)


def _cudnn(case: Case, decay: bool) -> Implementation:
    if case.device.type != "cuda":
        raise AbsentError("cuDNN needs a GPU")
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention

    def attention(x: Tensors) -> Tensor:
        keep = torch.is_grad_enabled()
        output: Tensor = attend(x["q"], x["k"], x["v"], None, keep, 0.0, True)[0]
        return output

    return _softmax("sdpa_cudnn", attention, decay)


def _softmax(name: str, attention: Callable[[Tensors], Tensor], decay: bool) -> Implementation:
    if decay:
        raise AbsentError("softmax attention has no decay")

    def heads_first(inputs: Tensors) -> Tensors:
        return {name: inputs[name].transpose(1, 2).contiguous() for name in ("q", "k", "v", "d_o")}

    return Implementation(name, attention, ("q", "k", "v"), heads_first)


def _transformers(case: Case, decay: bool) -> Implementation:
    if case.op != "delta_rule":
        raise AbsentError("it has the delta rule only")
    (function,) = _load("transformers", _load_transformers)

    def delta(x: Tensors) -> Tensor:
        output: Tensor = function(x["q"], x["k"], x["v"], g=x["decay"], beta=x["beta"])[0]
        return output

    def with_decay(inputs: Tensors) -> Tensors:
        """It has no form without decay: there it is zero."""
        zero = torch.zeros(case.shape[:3], device=case.device)
        return {"decay": zero} | inputs

    return Implementation("transformers", delta, _leaves(case, decay), with_decay)


def _load(name: str, load: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    if installed_version(PACKAGES[name]) is None:
        raise AbsentError(f"{PACKAGES[name]} is not installed")
    try:
        return load()
    except Exception as error:  # a stranger's import can fail in any way
        raise AbsentError(f"cannot be imported: {one_line(error)}") from error


@cache
def _load_fla() -> tuple[Any, ...]:
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.linear_attn import chunk_linear_attn

    return chunk_linear_attn, chunk_delta_rule


@cache
def _load_transformers() -> tuple[Any, ...]:
    """The function in PyTorch, without what puts another library's kernel in its place."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    return (inspect.unwrap(torch_chunk_gated_delta_rule),)


def one_line(error: BaseException) -> str:
    """The first line of an error's message, with its type."""
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0]}" if message else type(error).__name__
