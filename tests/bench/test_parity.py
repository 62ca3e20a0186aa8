"""Ours is right or nothing is timed; peers are told apart and go on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rankone.bench.cases import OPS, Case, Shape
from rankone.bench.parity import ParityError, attention_truth, compare, truth_of
from rankone.bench.peers import AbsentError, Implementation, bind, find, one_line

CPU = torch.device("cpu")


def case(op: str = "delta_rule", T: int = 70) -> Case:
    return Case(op, Shape(2, T, 2, 8, 12), torch.float32, CPU)


def wrong(implementation: Implementation, *, name: str | None = None) -> Implementation:
    """The output is right, its gradient for q is not."""
    honest = implementation.function

    def function(x):
        output = honest(x)
        return output + (x["q"] - x["q"].detach()).sum() * 1e-2

    return replace(implementation, function=function, name=name or implementation.name)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("decay", [False, True])
def test_ours_agrees_with_the_definition(op, decay):
    inputs = case(op).inputs(decay=decay)
    found = find("chunked", case(op), decay=decay)
    record = compare(case(op), found, inputs, truth_of(case(op), inputs, "reference"))
    assert record["within"]
    assert record["decay"] == decay
    assert record["truth"] == "reference"
    assert set(found.leaves) == set(inputs) - {"d_o"}


def test_softmax_attention_agrees_with_its_formula():
    inputs = case().inputs(decay=False)
    record = compare(case(), find("sdpa", case(), decay=False), inputs, attention_truth(inputs))
    assert record["within"]


def test_a_wrong_gradient_of_ours_is_an_error():
    inputs = case().inputs(decay=True)
    truth = truth_of(case(), inputs, "reference")
    with pytest.raises(ParityError, match=r"delta_rule with impl='chunked' is wrong.*dq"):
        compare(case(), wrong(find("chunked", case(), decay=True)), inputs, truth)


def test_a_wrong_gradient_of_a_peer_is_marked():
    inputs = case().inputs(decay=True)
    truth = truth_of(case(), inputs, "reference")
    peer = wrong(find("chunked", case(), decay=True), name="fla")
    record = compare(case(), peer, inputs, truth)
    assert not record["within"]
    assert record["worst_gradient"] == "dq"
    assert record["gradient_error"] > record["gradient_limit"]
    assert record["error"] <= record["limit"]


def test_a_result_that_is_not_a_number_is_not_within():
    inputs = case().inputs(decay=False)
    truth = truth_of(case(), inputs, "reference")
    honest = find("chunked", case(), decay=False)
    peer = replace(honest, name="fla", function=lambda x: honest.function(x) * torch.nan)
    record = compare(case(), peer, inputs, truth)
    assert not record["within"]
    assert record["error"] is None


def test_the_forward_pass_keeps_nothing_for_a_backward():
    bound = bind(find("chunked", case(), decay=False), case().inputs(decay=False))
    assert not bound.forward().requires_grad
    assert all(not x.requires_grad for x in bound.forward_backward())


@pytest.mark.parametrize(
    ("name", "op", "decay", "why"),
    [
        ("fla", "delta_rule", False, "need a GPU"),
        ("sdpa", "delta_rule", True, "no decay"),
        ("sdpa_cudnn", "delta_rule", False, "needs a GPU"),
        ("transformers", "linear_attention", False, "delta rule only"),
        ("transformers", "delta_rule", False, "transformers is not installed"),
    ],
)
def test_what_is_not_there_says_why(name, op, decay, why):
    with pytest.raises(AbsentError, match=why):
        find(name, case(op), decay=decay)


def test_an_error_is_told_in_one_line():
    assert one_line(RuntimeError("out of luck\n  at line 3")) == "RuntimeError: out of luck"
    assert one_line(KeyError()) == "KeyError"


def test_inputs_with_and_without_decay_are_the_same_otherwise():
    plain, faded = case().inputs(decay=False), case().inputs(decay=True)
    assert set(faded) - set(plain) == {"decay"}
    assert all(torch.equal(plain[name], faded[name]) for name in plain)
    assert float(faded["decay"].max()) <= 0
