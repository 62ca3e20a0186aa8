"""Experiments find what is known, and write what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rankone.icl import LinearTransformer, constant_ridge
from rankone.icl.chosen import chosen_models
from rankone.icl.ensemble import Run
from rankone.icl.experiments import minima, real_data, run, transfer
from rankone.icl.folder import model_path
from rankone.icl.gdpp import eigenvalue_nodes, population_loss
from rankone.icl.theory import gradient_descent
from rankone.storage import write_json
from rankone.tasks.noise import Fixed, Uniform

DIM, CONTEXT = 10, 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with a GD++ model that takes one step, and a small FULL model."""
    preset = {"name": "tiny", "dim": DIM, "context": CONTEXT}
    write_json(tmp_path / "config.json", {"configuration": {"preset": preset}})
    one = gradient_descent([0.02], dim=DIM)
    one.save(model_path(tmp_path, Run("gd++", 1, "sigma_5", 0)))
    full = LinearTransformer(kind="full", layers=1, dim=DIM, scale=0.01)
    full.save(model_path(tmp_path, Run("full", 1, "sigma_5", 0)))
    return tmp_path


@pytest.fixture
def small(monkeypatch):
    """Few prompts, few values, few starts."""
    monkeypatch.setattr(transfer, "PROMPTS", 200)
    few = {axis: (told, values[:2]) for axis, (told, values) in transfer.AXES.items()}
    monkeypatch.setattr(transfer, "AXES", few)
    monkeypatch.setattr("rankone.report.figures.experiments.AXES", few)
    monkeypatch.setattr(real_data, "PROMPTS", 100)
    monkeypatch.setattr(minima, "STARTS", 6)
    monkeypatch.setattr(minima, "STEPS", 60)


def test_the_last_step_is_the_best_one():
    values = eigenvalue_nodes(DIM, CONTEXT, count=100, samples=2000)
    w_xx, w_yx = -torch.rand(2, 30, generator=torch.Generator().manual_seed(0)).double() / 50
    for variance in (0.0, 5.0):
        last = minima.best_last(w_xx, w_yx, values, variance)

        def loss(step, variance=variance):
            first = torch.stack([w_xx, torch.zeros_like(w_xx)], dim=-1)
            second = torch.stack([w_yx, step], dim=-1)
            return population_loss(first, second, values, variance, DIM)

        for factor in (0.99, 1.01):
            assert bool((loss(last) <= loss(factor * last)).all())


def test_gdpp_of_two_layers_has_the_minima_that_are_known():
    found = minima.find_minima(variance=0.0)
    losses = [record["loss"] for record in found]
    assert losses == sorted(losses)
    assert losses[0] == pytest.approx(0.26, abs=0.01)
    assert losses[1] == pytest.approx(0.342, abs=0.003)  # where training ends, as published
    assert found[1]["w_xx"] == pytest.approx(-0.0123, abs=3e-4)
    assert sum(record["starts"] for record in found) <= minima.STARTS


@pytest.mark.parametrize("axis", list(transfer.AXES))
def test_only_one_thing_is_changed(axis, monkeypatch):
    monkeypatch.setattr(transfer, "PROMPTS", 20_000)
    value = {"context": 40, "noise": 2.0, "condition": 8, "tails": 5.0}[axis]
    drawn = transfer.draw(axis, value, dim=DIM, context=CONTEXT, noise=Uniform(0, 5))
    n = 40 if axis == "context" else CONTEXT
    assert drawn.context == n
    if axis == "noise":
        assert set(drawn.sigma.tolist()) == {2.0}
    else:
        assert float(drawn.sigma.max()) > 4.9
    sums = drawn.gram[:, :DIM, :DIM].mean(0) / n
    assert float((sums - drawn.covariance).abs().max()) < 0.05
    assert float(torch.trace(drawn.covariance)) == pytest.approx(DIM)
    values = torch.linalg.eigvalsh(drawn.covariance)
    assert float(values.max() / values.min()) == pytest.approx(8 if axis == "condition" else 1)
    square = drawn.gram[:, 0, 0] / drawn.covariance[0, 0]  # of a normal feature: variance 2 n
    assert (float(square.var()) > 4 * n) == (axis == "tails")


def test_a_ridge_of_the_right_noise_has_no_loss_above_the_oracle(folder, small):
    found = chosen_models(folder)
    records = transfer.transfer(found)
    assert {r["model"] for r in records} >= {"gd++", "full", "constrr", "bayes"}
    drawn = transfer.draw("noise", 0, dim=DIM, context=CONTEXT, noise=Uniform(0, 5))
    exact = transfer._losses(constant_ridge(drawn.gram, 0.0), drawn)
    assert float(exact.max()) < 1e-9
    step = [r for r in records if r["model"] == "gd++" and r["axis"] == "context"]
    assert all(r["adjusted_loss"] > 0 for r in step)
    few = [r for r in records if r["axis"] == "context" and r["value"] <= DIM]
    assert few
    assert not any(r["model"] == "adarr" for r in few)


def test_the_penalty_is_the_one_that_leaving_out_prefers():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 20, 4, generator=g, dtype=torch.float64)
    y = torch.randn(6, 20, generator=g, dtype=torch.float64)
    got = real_data.left_out_ridge(x, y)
    for b in range(6):
        scores = []
        for penalty in real_data.PENALTIES:
            off = []
            for row in range(20):
                keep = torch.arange(20) != row
                a, c = x[b][keep], y[b][keep]
                w = torch.linalg.solve(a.T @ a + penalty * torch.eye(4).double(), a.T @ c)
                off.append(float((x[b, row] @ w - y[b, row]) ** 2))
            scores.append(sum(off))
        penalty = real_data.PENALTIES[scores.index(min(scores))]
        want = torch.linalg.solve(x[b].T @ x[b] + penalty * torch.eye(4).double(), x[b].T @ y[b])
        torch.testing.assert_close(got[b], want)


@pytest.mark.parametrize("name", real_data.SETS)
def test_tables_are_white_and_of_mean_0(name):
    table = real_data.load(name, DIM)
    assert float(table.x.mean(0).abs().max()) < 1e-9
    covariance = table.x.T @ table.x / len(table.y)
    assert float((covariance - torch.eye(DIM).double()).abs().max()) < 1e-9
    assert float(table.y.mean()) == pytest.approx(0.0, abs=1e-9)
    assert float(table.y.square().mean()) == pytest.approx(1.0)


@pytest.mark.parametrize("name", run.NAMES)
@pytest.mark.usefixtures("small")
def test_an_experiment_writes_its_records_and_its_figure(name, folder, capsys):
    out = run.experiment(name, run=folder)
    content = json.loads((out / f"{name}.json").read_text())
    assert {"command", "device", "versions", "date", "commit", "seconds", "records"} <= set(content)
    assert content["records"]
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert f"{name}.json" in capsys.readouterr().out.replace("\n", "")


def test_what_is_not_there_is_refused(folder):
    with pytest.raises(ValueError, match="experiment must be one of minima, transfer, real_data"):
        run.experiment("heads", run=folder)
    found = chosen_models(folder)
    with pytest.raises(ValueError, match="noise must be one that was trained on, sigma_5; got set"):
        transfer.deepest(found, "set_1_3")
    with pytest.raises(ValueError, match="axis must be one of context, noise, condition, tails"):
        transfer.draw("length", 1.0, dim=DIM, context=CONTEXT, noise=Fixed(1.0))
    with pytest.raises(ValueError, match="data must be one of diabetes, wine, breast cancer"):
        real_data.load("iris", DIM)
