"""Ratios and exponents are what their names say."""

from __future__ import annotations

from typing import Any

import pytest

from rankone.bench.cases import Record
from rankone.bench.summary import exponents, slope, with_ratios


def record(impl: str, ms: float, *, decay: bool = False, T: int = 2048, **more: Any) -> Record:
    place = {"op": "delta_rule", "pass": "forward", "dtype": "bfloat16", "device": "cuda"}
    sizes = {"B": 1, "T": T, "H": 16, "K": 128, "V": 64}
    return {**place, **sizes, "impl": impl, "decay": decay, "ms": ms, "peak_gib": ms / 2} | more


def test_ratios_say_how_many_times_as_long_the_peer_takes():
    records = [
        record("triton", 2.0),
        record("triton", 3.0, decay=True),
        record("fla", 5.0),
        record("sdpa", 8.0),
    ]
    ours, faded, *theirs = with_ratios(records, bandwidth=1e12)
    assert ours["times_fla"] == 2.5
    assert ours["times_sdpa"] == 4.0
    assert ours["times_transformers"] is None
    assert ours["decay_cost"] is None
    assert faded["times_fla"] is None  # not measured with decay
    assert faded["times_sdpa"] == pytest.approx(8 / 3, rel=1e-3)
    assert faded["decay_cost"] == 1.5
    assert theirs == records[2:]


def test_the_limit_is_the_time_of_copying_what_comes_in_and_goes_out():
    (ours,) = with_ratios([record("triton", 2.0)], bandwidth=1e9)
    moved = 2 * 2048 * 16 * (128 + 128 + 64 + 64)
    assert ours["limit_ms"] == pytest.approx(1000 * moved / 1e9, rel=1e-4)
    assert ours["times_limit"] == pytest.approx(2.0 / ours["limit_ms"], rel=1e-3)
    (both,) = with_ratios([record("triton", 2.0, **{"pass": "forward_backward"})], bandwidth=1e9)
    assert "limit_ms" not in both


def test_ratios_are_computed_anew():
    once = with_ratios([record("triton", 2.0), record("sdpa", 4.0)], bandwidth=1e9)
    assert with_ratios(once, bandwidth=1e9) == once


def test_only_long_enough_and_comparable_lengths_are_fitted():
    lengths = (512, 2048, 4096, 8192)
    ours = [record("triton", 1e-3 * T, T=T) for T in lengths]
    quadratic = [record("sdpa", 1e-6 * T**2, T=T) for T in lengths]
    mixed = [record("chunked", 1.0, T=T, B=B) for B, T in enumerate(lengths)]
    (fit,) = exponents([*ours, *quadratic, *mixed])
    assert (fit["impl"], fit["from_T"]) == ("triton", 2048)
    assert fit["ms_exponent"] == pytest.approx(1.0)
    assert fit["peak_gib_exponent"] == pytest.approx(1.0)


def test_one_point_has_no_slope():
    assert slope([(2.0, 3.0)]) is None
