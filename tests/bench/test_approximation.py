"""Approximations come nearer to softmax as there is more of them; features vary as predicted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import normalize

from rankone.bench import approximation
from rankone.bench.approximation import (
    Heads,
    Plan,
    approximations,
    bench,
    kernels,
    measure,
    random_heads,
    shortened,
)
from rankone.bench.approximation_summary import show
from rankone.models import Encoder, EncoderConfig
from rankone.tasks.long_range import listops

TINY = Plan(length=64, counts=(8, 64), draws=2, pairs=5, kernel_draws=20, steps=2)
NAMES = {
    "performer", "performer, independent", "sines and cosines", "linformer, not trained",
    "nystromformer", "longformer", "bigbird",
}  # fmt: skip


def heads(length: int, dim: int, *, size: float = 1.0) -> Heads:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, 2, dim, generator=g) for _ in range(3))
    return Heads(size * q, size * k, v)


def errors(given: Heads, *counts: int, draws: int = 4) -> dict[str, list[float]]:
    """Errors of every approximation, count by count."""
    found: dict[str, list[float]] = {}
    for record in measure("data", given, Plan(counts=counts, draws=draws), lambda: None):
        found.setdefault(record["mechanism"], []).append(record["error"])
    return found


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other are slow where other programs are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    examples = listops.listops
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listops, "listops", lambda _, **options: examples((40, 1, 1), **options))
        return bench(out=tmp_path_factory.mktemp("run") / "all.json", plan=TINY)


@pytest.fixture
def result(path):
    return json.loads(path.read_text())


def test_what_is_approximated_is_softmax_attention():
    given = heads(9, 4)
    scores = torch.einsum("bthk,bshk->bhts", given.q, given.k) / 2
    want = torch.einsum("bhts,bshv->bthv", scores.softmax(-1), given.v)
    torch.testing.assert_close(given.softmax, want)


def test_errors_fall_with_features():
    found = errors(heads(64, 16, size=0.5), 8, 64, 512)
    for name in ("performer", "performer, independent", "sines and cosines"):
        assert found[name] == sorted(found[name], reverse=True)
        assert found[name][-1] < 0.3 * found[name][0]


def test_errors_fall_with_landmarks_tokens_and_rank():
    found = errors(heads(64, 16, size=0.5), 8, 32, 64)
    for name in ("nystromformer", "longformer", "bigbird", "linformer, not trained"):
        assert found[name] == sorted(found[name], reverse=True)


def test_as_many_landmarks_as_tokens_are_softmax_attention():
    found = errors(heads(64, 16), 63, 64)["nystromformer"]
    assert found[1] < 1e-5 < found[0]


def test_a_window_over_everything_is_softmax_attention():
    found = errors(heads(64, 16), 124, 126)["longformer"]
    assert found[1] < 1e-5 < found[0]


def test_blocks_over_everything_are_softmax_attention():
    assert errors(heads(64, 16), 128)["bigbird"][0] < 1e-5


def test_there_are_no_more_landmarks_than_tokens():
    g = torch.Generator().manual_seed(0)
    assert {name for name, *_ in approximations(heads(64, 16), 64, g)} == NAMES
    assert {name for name, *_ in approximations(heads(64, 16), 65, g)} == NAMES - {"nystromformer"}


def test_what_is_random_is_drawn_more_than_once():
    records = measure("data", heads(64, 16), Plan(counts=(16,), draws=3), lambda: None)
    assert {record["mechanism"] for record in records} == NAMES
    for record in records:
        fixed = record["mechanism"] in ("nystromformer", "longformer")
        assert record["draws"] == (1 if fixed else 3)
        assert (record["deviation"] == 0.0) is fixed


def test_means_and_deviations_are_over_draws(monkeypatch):
    given = heads(8, 4)
    outputs = iter(given.softmax * (1 + error) for error in (0.1, 0.2, 0.6))
    one = [("bigbird", "tokens", lambda: next(outputs))]
    monkeypatch.setattr(approximation, "approximations", lambda *_: iter(one))
    (record,) = measure("data", given, Plan(counts=(16,), draws=3), lambda: None)
    assert record["error"] == pytest.approx(0.3, rel=1e-3)
    assert record["deviation"] == pytest.approx(0.07**0.5, rel=1e-3)


@pytest.mark.parametrize("angle", [0.0, 1.0, 3.0])
def test_features_vary_as_lemma_2_says(angle):
    x, y = torch.zeros(2, 16)
    x[0], y[0], y[1] = 0.7, 0.5 * math.cos(angle), 0.5 * math.sin(angle)
    given = Heads(*(2 * z.view(1, 1, 1, 16) for z in (x, y, x)))
    found = {r["features"]: r for r in kernels("data", given, Plan(pairs=1, kernel_draws=1200))}
    kernel = (x @ y).exp()
    near, far = (x + y).square().sum(), (x - y).square().sum()
    want = {
        "positive, independent": near.exp() * kernel**2 * (1 - (-near).exp()),
        "sines and cosines": near.exp() * kernel**-2 * (1 - (-far).exp()) ** 2 / 2,
    }
    for name, variance in want.items():
        relative = float(variance / kernel**2)
        assert found[name]["predicted"] == pytest.approx(relative, rel=1e-3)
        assert found[name]["variance"] == pytest.approx(relative, rel=0.15)
    assert found["positive, orthogonal"]["predicted"] is None


SHORT = heads(32, 16, size=0.5)


@pytest.fixture(scope="module")
def features():
    return {r["features"]: r for r in kernels("data", SHORT, Plan(pairs=100, kernel_draws=1500))}


def test_features_are_unbiased(features):
    for record in features.values():
        assert 0.5 < record["bias_in_errors"] < 1.6


def test_orthogonal_features_vary_less(features):
    orthogonal, independent = (
        features[f"positive, {name}"]["variance"] for name in ("orthogonal", "independent")
    )
    assert orthogonal < 0.95 * independent


@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_a_bias_shows(monkeypatch, factor):
    honest = approximation._positive
    monkeypatch.setattr(approximation, "_positive", lambda x, w: factor * honest(x, w))
    for record in kernels("data", SHORT, Plan(pairs=100, kernel_draws=500))[:2]:
        assert record["bias_in_errors"] > 3


def test_what_is_not_finite_is_not_told():
    records = kernels("data", heads(32, 8, size=30.0), Plan(pairs=5, kernel_draws=3))
    assert {r["predicted"] for r in records} == {None}
    assert json.loads(json.dumps(records, allow_nan=False)) == records


def test_shortened_queries_and_keys_have_length_1_where_features_take_them():
    given = heads(16, 8, size=3.0)
    short = shortened(given)
    for x, y in zip(given[:2], short[:2], strict=True):
        torch.testing.assert_close(y * 8**-0.25, normalize(x, dim=-1))
    assert short.v is given.v


def test_random_scores_have_variance_1():
    q, k, _ = random_heads(TINY)
    scores = torch.einsum("bthk,bshk->bhts", q, k) / q.shape[3] ** 0.5
    assert float(scores.var()) == pytest.approx(1.0, rel=0.05)


def test_heads_of_a_model_are_those_of_its_longest_sequences_without_padding():
    config = EncoderConfig("softmax", vocabulary=16, classes=3, max_length=12, dim=16)
    model = Encoder(config)
    tokens = torch.zeros(3, 12, dtype=torch.long)
    for row, length in enumerate((9, 5, 7)):
        tokens[row, :length] = torch.arange(1, 1 + length)
    seen = []
    hook = model.blocks[0].mixer.register_forward_pre_hook(lambda layer, args: seen.append(args))
    found = approximation._heads_of(model, tokens)
    hook.remove()
    assert len(found) == len(model.blocks)
    ((x, *_),) = seen
    assert x.shape[:2] == (2, 7)
    for got, want in zip(found[0], model.blocks[0].mixer.project(x), strict=True):
        assert torch.equal(got, want)


def test_the_file_holds_all_sources_and_counts(result):
    assert {"command", "device", "versions", "date", "commit", "threads", "seconds"} <= set(result)
    sources = ["random", "trained, layer 1", "trained, layer 2"]
    assert list(dict.fromkeys(r["data"] for r in result["records"])) == sources
    found = [(r["data"], r["mechanism"], r["count"]) for r in result["records"]]
    assert len(set(found)) == len(found)
    all_of_them = {(data, name, count) for data in sources for name in NAMES for count in (8, 64)}
    no_landmarks = {(data, "nystromformer", 64) for data in sources[1:]}
    assert all_of_them - no_landmarks <= set(found) <= all_of_them
    assert {r["data"] for r in result["features"]} == {*sources, "random, of length 1"}
    assert len(result["features"]) == 12


def test_the_tables_show_all_approximations(result, capsys):
    show(result)
    first, *others, last = capsys.readouterr().out.split(": relative error beside softmax")
    assert first == "random"
    for table in (*others, last):
        assert {name for name in NAMES if f"\n  {name}  " in table} == NAMES
    assert last.count("positive, orthogonal") == 4


def test_the_plot_is_drawn_and_can_be_drawn_again(path, monkeypatch):
    monkeypatch.setattr(approximation, "measure", None)
    picture = path.with_suffix(".png")
    first, before = picture.read_bytes(), path.read_bytes()
    assert first.startswith(b"\x89PNG")
    picture.unlink()
    assert bench(redraw=path) == path
    assert picture.read_bytes() == first
    assert path.read_bytes() == before
