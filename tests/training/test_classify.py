import json
import math
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
import torch

from rankone.models import Encoder, EncoderConfig
from rankone.progress import Narrator
from rankone.storage import read_json, read_tensors, write_tensors
from rankone.tasks.long_range import split
from rankone.tasks.long_range.listops import Trees, listops
from rankone.training import classify
from rankone.training.classify import CHECKPOINT, Outcome, Training, read_outcome
from rankone.training.recipes import Recipe

CPU = torch.device("cpu")
RECIPE = Recipe(
    steps=12, batch=8, rate=1e-2, warm_up=3, train=60, held=30, dropout=0.2, dim=8, depth=1,
    heads=2, mlp=8, checks=4, grouped=2,
)  # fmt: skip
SIZES = (60, 30, 30)
TREES = listops(SIZES, trees=Trees(depth=3, arguments=3, longer_than=3, shorter_than=14))


class Watched(Training):
    """Keeps what its weights and its optimiser end with, and what each step was made of."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.rates, self.batches, self.lengths = [], [], []

    def _step(self, step, batch):
        loss = super()._step(step, batch)
        self.rates.append({group["lr"] for group in self.optimizer.param_groups})
        self.batches.append(batch)
        gradients = [p.grad.flatten() for p in self.model.parameters()]
        self.lengths.append(float(torch.cat(gradients).norm()))
        return loss

    def _finish(self, out):
        self.last = [x.clone() for x in self.model.state_dict().values()]
        for _, kept in sorted(self.optimizer.state_dict()["state"].items()):
            self.last += [kept["exp_avg"].clone(), kept["exp_avg_sq"].clone()]
        return super()._finish(out)


def configure(mechanism="linear", **changes):
    sizes = {"dim": 8, "depth": 1, "heads": 2, "mlp": 8, "vocabulary": 16, "classes": 10}
    options = {"features": 4} if mechanism == "performer" else {}
    return EncoderConfig(
        mechanism, **sizes | {"max_length": 14, "dropout": 0.2, "options": options} | changes
    )


def make(mechanism="linear", *, recipe=RECIPE, splits=TREES, seed=0, **changes):
    return Watched(configure(mechanism, **changes), recipe, splits, CPU, seed)


def run(training, out):
    with Narrator(quiet=True) as narrator:
        return training.run(out, narrator, "linear")


def result(folder):
    found = read_json(folder / "result.json")
    del found["seconds"]
    return found


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def interrupt(monkeypatch, training, *, before, saved):
    """Stops it before a step, its last checkpoint being that after so many steps."""
    save, step = training._save, training._step

    def saving(out):
        if training.seen.step <= saved:
            save(out)

    def stepping(number, batch):
        if number == before:
            raise KeyboardInterrupt
        return step(number, batch)

    monkeypatch.setattr(classify, "SAVED_EVERY", -1.0)
    monkeypatch.setattr(training, "_save", saving)
    monkeypatch.setattr(training, "_step", stepping)


@pytest.mark.parametrize(("before", "saved"), [(1, 1), (3, 3), (5, 2), (11, 11), (7, 0)])
@pytest.mark.parametrize("mechanism", ["softmax", "performer"])
def test_a_training_that_was_stopped_ends_with_the_same_bits(
    mechanism, before, saved, tmp_path, monkeypatch
):
    whole = make(mechanism)
    outcome = run(whole, tmp_path / "whole")
    out = tmp_path / "parts"
    stopped = make(mechanism)
    with monkeypatch.context() as patch:
        interrupt(patch, stopped, before=before, saved=saved)
        with pytest.raises(KeyboardInterrupt):
            run(stopped, out)
    assert (out / CHECKPOINT).exists() == (saved > 0)
    assert not (out / "result.json").exists()
    torch.rand(3)
    again = make(mechanism)
    assert run(again, out)._replace(seconds=0) == outcome._replace(seconds=0)
    assert len(again.batches) == RECIPE.steps - saved
    assert same(again.last, whole.last)
    assert result(out) == result(tmp_path / "whole")
    best, other = (
        read_tensors(tmp_path / name / "model.safetensors")[0] for name in ("whole", out)
    )
    assert same(best.values(), other.values())


def test_a_training_that_was_stopped_at_its_end_is_judged_without_another_step(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(classify, "SAVED_EVERY", -1.0)
    training = make()
    with monkeypatch.context() as patch:
        patch.setattr(training, "accuracy", lambda examples: 0.5)
        patch.setattr(classify, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(training, tmp_path)
    again = make()
    assert run(again, tmp_path).validation == 0.5
    assert again.batches == []
    assert not (tmp_path / CHECKPOINT).exists()


def test_time_before_an_interruption_counts(tmp_path, monkeypatch):
    training = make()
    interrupt(monkeypatch, training, before=2, saved=2)
    with pytest.raises(KeyboardInterrupt):
        run(training, tmp_path)
    tensors, facts = read_tensors(tmp_path / CHECKPOINT)
    seen = json.loads(facts["seen"]) | {"seconds": 100.0}
    write_tensors(tmp_path / CHECKPOINT, tensors, {"seen": json.dumps(seen)})
    assert 100 <= run(make(), tmp_path).seconds < 160


def test_checkpoints_are_seconds_apart(tmp_path, monkeypatch):
    training = make()
    monkeypatch.setattr(training, "_save", lambda out: pytest.fail("saved too early"))
    run(training, tmp_path)


def test_the_seed_decides_weights_and_batches_and_the_mechanism_no_batch(tmp_path):
    first, second, other = make(), make(), make(seed=1)
    softmax = make("softmax", dropout=0.0)
    for n, training in enumerate((first, second, other, softmax)):
        run(training, tmp_path / str(n))
    assert same(first.last, second.last)
    assert not same(first.last, other.last)

    def tokens(training):
        return [batch.tokens.tolist() for batch in training.batches]

    assert tokens(first) == tokens(second) == tokens(softmax) != tokens(other)


def test_every_example_comes_before_any_comes_again(tmp_path):
    training = make(recipe=replace(RECIPE, steps=7))
    run(training, tmp_path)
    rows = [tuple(row[row > 0].tolist()) for b in training.batches for row in b.tokens]
    train = {tuple(row[row > 0].tolist()) for row in TREES.train.tokens}
    assert len(rows) == len(set(rows)) == 56
    assert set(rows) <= train


@pytest.mark.parametrize(
    ("steps", "warm_up", "heights"),
    [
        (10, 4, [1 / 4, 2 / 4, 3 / 4, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        (4, 1, [1, 1, 2 / 3, 1 / 3]),
        (1, 1, [1]),
    ],
)
def test_the_rate_rises_and_falls_linearly_to_0(steps, warm_up, heights, tmp_path):
    training = make(recipe=replace(RECIPE, steps=steps, warm_up=warm_up, rate=0.5))
    run(training, tmp_path)
    rates = [rate for (rate,) in training.rates]
    assert rates == pytest.approx([0.5 * height for height in heights])


def test_only_matrices_decay():
    training = make(recipe=replace(RECIPE, weight_decay=0.3))
    decays = {}
    for group in training.optimizer.param_groups:
        for parameter in group["params"]:
            decays[id(parameter)] = group["weight_decay"]
    for name, parameter in training.model.named_parameters():
        assert decays[id(parameter)] == (0.3 if parameter.dim() > 1 else 0), name


def test_gradients_are_clipped(tmp_path):
    free, clipped = make(recipe=replace(RECIPE, clip=1e9)), make(recipe=replace(RECIPE, clip=1e-3))
    run(free, tmp_path / "free")
    run(clipped, tmp_path / "clipped")
    assert min(free.lengths) > 1e-2
    assert clipped.lengths == pytest.approx([1e-3] * 12, rel=1e-3)


def test_the_first_loss_is_the_cross_entropy_of_the_batch():
    training = make(dropout=0.0)
    batch = TREES.train.take(torch.arange(8))
    scores = training.model(batch.tokens).detach()
    want = (scores.logsumexp(1) - scores[torch.arange(8), batch.labels]).mean()
    torch.testing.assert_close(training._step(0, batch), want)


def test_the_accuracy_is_the_share_of_right_answers_without_dropout():
    training = make(recipe=replace(RECIPE, batch=7))
    model = Encoder(configure())
    model.load_state_dict(training.model.state_dict())
    tokens = TREES.validation.tokens.long()
    right = (model.eval()(tokens).argmax(1) == TREES.validation.labels).float().mean()
    training.model.train()
    assert training.accuracy(TREES.validation) == pytest.approx(float(right))


@pytest.mark.parametrize(
    ("watched", "best"), [([0.2, 0.9, 0.9, 0.5], 1), ([0.7, 0.1, 0.1, 0.1], 0), ([0, 0, 0, 0.1], 3)]
)
def test_the_weights_that_were_best_on_validation_are_judged(watched, best, tmp_path, monkeypatch):
    training = make()
    real, taken, answers = training.accuracy, [], iter(watched)

    def accuracy(examples):
        if examples is not TREES.validation:
            return real(examples)
        taken.append([x.clone() for x in training.model.state_dict().values()])
        return next(answers)

    monkeypatch.setattr(training, "accuracy", accuracy)
    outcome = run(training, tmp_path)
    saved, _ = read_tensors(tmp_path / "model.safetensors")
    assert same((saved[name] for name in training.model.state_dict()), taken[best])
    assert all(not same(a, b) for a, b in pairwise(taken))
    assert (outcome.validation, outcome.best_step) == (watched[best], 3 * (best + 1))
    judged = make(seed=1)
    judged.model.load_state_dict(saved)
    assert outcome.accuracy == judged.accuracy(TREES.test)


def test_the_result_says_how_it_went(tmp_path):
    training = make()
    outcome = run(training, tmp_path)
    found = read_json(tmp_path / "result.json")
    assert set(found) == {*Outcome._fields, "history", "recipe"}
    assert Outcome(**{name: found[name] for name in Outcome._fields}) == outcome
    p = outcome.accuracy
    assert p == training.accuracy(TREES.test)
    assert found["standard_error"] == pytest.approx(math.sqrt(p * (1 - p) / 30))
    assert found["parameters"] == sum(p.numel() for p in Encoder(configure()).parameters())
    assert found["recipe"] == asdict(RECIPE)
    assert [entry["step"] for entry in found["history"]] == [3, 6, 9, 12]
    assert found["validation"] == max(entry["accuracy"] for entry in found["history"])
    assert all(0 < entry["loss"] < 10 for entry in found["history"])
    assert {file.name for file in tmp_path.iterdir()} == {"model.safetensors", "result.json"}


@pytest.mark.parametrize(
    ("steps", "checks", "looks"),
    [(11, 4, [2, 4, 6, 8, 10, 11]), (3, 20, [1, 2, 3]), (2, 1, [2])],
)
def test_the_last_step_is_always_looked_at(steps, checks, looks, tmp_path):
    run(make(recipe=replace(RECIPE, steps=steps, checks=checks)), tmp_path)
    assert [entry["step"] for entry in result(tmp_path)["history"]] == looks


def test_an_outcome_is_read_once_it_is_there(tmp_path):
    assert read_outcome(tmp_path) is None
    assert read_outcome(tmp_path / "nowhere") is None
    assert run(make(), tmp_path) == read_outcome(tmp_path)


def presence(count):
    """Is there a 5?"""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(6, 12, (count, 10), generator=g, dtype=torch.uint8)
    labels = torch.arange(count) % 2
    places = torch.randint(10, (count,), generator=g)
    tokens[labels == 1, places[labels == 1]] = 5
    return tokens, labels


def likeness(count):
    """Are two sequences of the same token?"""
    g = torch.Generator().manual_seed(0)
    kinds = torch.randint(1, 3, (count, 2), generator=g)
    tokens = kinds[..., None].expand(count, 2, 6).to(torch.uint8).contiguous()
    return tokens, (kinds[:, 0] == kinds[:, 1]).long()


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "performer"])
@pytest.mark.parametrize("task", [presence, likeness])
def test_what_can_be_learned_is_learned(task, mechanism, tmp_path):
    splits = split(*task(400), (200, 100, 100))
    recipe = replace(RECIPE, steps=120, batch=32, warm_up=10, rate=2e-2)
    pair = task is likeness
    training = make(
        mechanism, recipe=recipe, splits=splits, classes=2, dropout=0.0, positions="none", pair=pair
    )
    outcome = run(training, tmp_path)
    assert 0.4 < splits.test.majority < 0.6
    assert (outcome.accuracy, outcome.standard_error, outcome.validation) == (1, 0, 1)


def test_a_loss_that_is_not_finite_says_what_to_try(tmp_path):
    training = make(recipe=replace(RECIPE, rate=1e30))
    with pytest.raises(ValueError, match=r"linear: the loss is not finite at step 3; .*--rate"):
        run(training, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["noise", "weights", "another model"])
def test_a_checkpoint_that_is_something_else_is_refused(content, tmp_path, monkeypatch):
    path = tmp_path / CHECKPOINT
    if content == "noise":
        path.write_bytes(b"noise")
    elif content == "weights":
        write_tensors(path, make().model.state_dict())
    else:
        other = make("softmax", mlp=9)
        with monkeypatch.context() as patch:
            interrupt(patch, other, before=2, saved=2)
            with pytest.raises(KeyboardInterrupt):
                run(other, tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"{CHECKPOINT}.* delete it"):
        run(make(), tmp_path)
    assert path.read_bytes() == before


def test_a_result_that_is_something_else_is_refused(tmp_path):
    for text in ("{", "[]", '{"accuracy": 1}'):
        (tmp_path / "result.json").write_text(text)
        with pytest.raises(ValueError, match=r"result\.json.* delete it"):
            read_outcome(tmp_path)


def test_a_message_is_said_at_every_look(tmp_path, capsys):
    with Narrator() as narrator:
        make().run(tmp_path, narrator, "linear")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "linear: 12 parts"
    assert [line.split(",")[0] for line in lines[1:]] == [
        f"linear: step {step}" for step in (3, 6, 9, 12)
    ]
