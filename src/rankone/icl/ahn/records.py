"""Flat records of everything that is measured on the trained groups.

`record` says what one is about:

    model      a trained model: its losses
    matrix     a matrix of a trained model: the nearest multiple of the identity, and the distance
    theorem1   one layer beside the closed form of Theorem 1
    optimum    a minimum of the exact expectation over multiples of the identity
    published  the published multiples: their losses
    baseline   steps of gradient descent with the best rate, or least squares

Losses are E[(prediction - truth)²]: `median_loss` is that of the median of several draws of fresh
plain prompts, `expected_loss` the expectation, estimated from spiked prompts, `nearest_loss` the
exact expectation of the model of the nearest multiples of the identity.
"""

from __future__ import annotations

from typing import Any

import torch

from rankone.icl.ahn.closed_forms import (
    Method,
    best_rate,
    descent,
    exact_optima,
    least_squares_loss,
    theorem1_loss,
    theorem1_minimum,
)
from rankone.icl.ahn.layers import Family, Matrices, unwhiten
from rankone.icl.ahn.measures import (
    distance,
    draw_losses,
    fresh_prompts,
    layer_order,
    multiple,
    shown,
)
from rankone.icl.ahn.presets import CONTEXT, LAYERS, Group, Preset
from rankone.icl.ahn.problem import Problem
from rankone.icl.ahn.published import MULTIPLES
from rankone.icl.ahn.spectrum import degree, expected_loss
from rankone.icl.ahn.training import Recipe, Trained

Record = dict[str, Any]
TEST_SEED = 99
METHODS: tuple[Method, ...] = ("gd", "pgd")


def problem_of(group: Group, seed: int) -> Problem:
    """The problem of a group; all groups have the same rotation."""
    return Problem(context=group.context, seed=seed, weights=group.weights)


def model_records(group: Group, trained: Trained, preset: Preset, seed: int) -> list[Record]:
    """Losses of a group's models, and their matrices."""
    problem = problem_of(group, seed)
    plain = fresh_prompts(problem, preset.draws, preset.prompts, seed=TEST_SEED)
    median = draw_losses(trained.matrices, problem, plain).median(0).values
    shape = degree(group.layers, trained.matrices.B.shape[1])
    spiked = fresh_prompts(
        problem, preset.draws, preset.spiked_prompts, seed=TEST_SEED, degree=shape
    )
    expected = draw_losses(trained.matrices, problem, spiked).mean(0)
    seen = shown(trained.matrices, problem)
    a, b = multiple(seen.A), multiple(seen.B)
    nearest = expected_loss(a, b, context=group.context) if group.weights == "inverse" else None
    records: list[Record] = []
    for row in range(group.seeds):
        records.append(
            {
                "record": "model",
                **_name(group),
                "seed": row,
                "training_loss": float(trained.training_loss[row]),
                "median_loss": _finite(median[row]),
                "expected_loss": _finite(expected[row]),
                "nearest_loss": None if nearest is None else _finite(nearest[row]),
                "prompts": Recipe(**group.recipe(preset)).prompts,
                "iterations": int(trained.steps[-1]),
            }
        )
    return records + matrix_records(group, seen)


def _name(group: Group) -> Record:
    return {
        "experiment": group.name,
        "family": group.family,
        "layers": group.layers,
        "examples": group.context,
        "trained_for": "expectation" if group.spiked else "sample",
    }


def _finite(value: torch.Tensor) -> float | None:
    return float(value) if bool(value.isfinite()) else None


def matrix_records(group: Group, seen: Matrices) -> list[Record]:
    """What the matrices are, beside what is published for them."""
    published = (
        MULTIPLES[group.family] if group.layers == LAYERS and group.context == CONTEXT else {}
    )
    like = published.get("A", ())
    order = torch.arange(group.layers).repeat(group.seeds, 1)
    if group.family == "theorem3" and like:
        order = layer_order(multiple(seen.A), like)
    found = []
    for name, whole in zip("AB", seen, strict=True):
        values, distances = multiple(whole), distance(whole)
        if name == "A":
            values, distances = values.gather(1, order), distances.gather(1, order)
        for row in range(group.seeds):
            for layer in range(whole.shape[1]):
                there = published.get(name, ())
                found.append(
                    {
                        "record": "matrix",
                        **_name(group),
                        "seed": row,
                        "matrix": name,
                        "layer": layer,
                        "multiple": float(values[row, layer]),
                        "distance": float(distances[row, layer]),
                        "published": there[layer] if there else None,
                    }
                )
    return found


def theorem1_records(group: Group, trained: Trained, seed: int) -> list[Record]:
    """Each trained layer beside the global minimum: exact losses, and |A - A*| / |A*|."""
    problem = problem_of(group, seed)
    best, A = theorem1_minimum(problem), trained.matrices.A[:, 0]
    losses = theorem1_loss(A, problem)
    return [
        {
            "record": "theorem1",
            "seed": row,
            "examples": group.context,
            "loss": float(losses[row]),
            "minimum_loss": float(theorem1_loss(best, problem)),
            "distance": float((A[row] - best).norm() / best.norm()),
        }
        for row in range(group.seeds)
    ]


def optimum_records(preset: Preset) -> list[Record]:
    """The exact optima of both families at n = 20, of all depths, and of all n.

    Theorem 3 is there for n = 10 as well, the number of examples that the text names once.
    """
    cases: list[tuple[Family, int, int]] = [("theorem3", LAYERS, 10), ("theorem3", LAYERS, CONTEXT)]
    cases += [("theorem4", layers, CONTEXT) for layers in sorted({*preset.depths, LAYERS})]
    cases += [("theorem4", LAYERS, n) for n in preset.contexts if n != CONTEXT]
    found = []
    for family, layers, n in cases:
        optima = exact_optima(family, layers, context=n, searches=preset.searches)
        for rank, optimum in enumerate(optima[:8]):
            found.append(
                {
                    "record": "optimum",
                    "family": family,
                    "layers": layers,
                    "examples": n,
                    "rank": rank,
                    "loss": optimum.loss,
                    "a": optimum.a,
                    "b": optimum.b,
                    "found": optimum.found,
                    "searches": preset.searches,
                }
            )
    return found


def published_records(preset: Preset, seed: int) -> list[Record]:
    """The losses of the published multiples of the identity."""
    problem = Problem(context=CONTEXT, seed=seed)
    plain = fresh_prompts(problem, preset.draws, preset.prompts, seed=TEST_SEED)
    eye = torch.eye(problem.dim, dtype=torch.float64)
    found = []
    for family, values in MULTIPLES.items():
        a, b = (torch.tensor(values[name], dtype=torch.float64) for name in "AB")
        white = Matrices(a[None, :, None, None] * eye, b[None, :, None, None] * eye)
        medians = draw_losses(unwhiten(white, problem), problem, plain).median(0).values
        found.append(
            {
                "record": "published",
                "family": family,
                "median_loss": float(medians[0]),
                "expected_loss": float(expected_loss(a, b, context=CONTEXT)),
            }
        )
    return found


def baseline_records(preset: Preset, seed: int) -> list[Record]:
    """Gradient descent and least squares: 3 steps for every n, all depths at n = 20.

    `given` is the number of examples that the baseline sees. The authors' code drops the last of
    the n examples (`Z[0:N-1]`), so that their baselines at n are ours at n - 1.
    """
    cases = {(LAYERS, n) for n in preset.contexts} | {(steps, CONTEXT) for steps in preset.depths}
    found = []
    for steps, n in sorted(cases):
        for given in {n, max(1, n - 1)}:
            problem = Problem(context=given, seed=seed)
            tuning, *draws = fresh_prompts(
                problem,
                preset.draws + 1,
                preset.spiked_prompts,
                seed=TEST_SEED,
                degree=degree(steps, 0),
            )
            base = {"record": "baseline", "layers": steps, "examples": n, "given": given}
            for method in METHODS:
                rate = best_rate(problem, method, steps, tuning)
                one = torch.tensor([rate], dtype=torch.float64)
                models = descent(problem, method, steps, one)
                loss = draw_losses(models, problem, draws).mean()
                found.append(base | {"method": method, "rate": rate, "expected_loss": float(loss)})
            loss_ols = least_squares_loss(problem.dim, given)
            found.append(base | {"method": "ols", "rate": None, "expected_loss": loss_ols})
    return found


__all__ = [
    "Record",
    "baseline_records",
    "matrix_records",
    "model_records",
    "optimum_records",
    "problem_of",
    "published_records",
    "theorem1_records",
]
