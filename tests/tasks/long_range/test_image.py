"""Digits, and CIFAR-10 from folders that are written here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from rankone.tasks.long_range.examples import Splits
from rankone.tasks.long_range.image import cifar, digits

FILES = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
SIZE = 3073


@pytest.fixture(scope="module")
def drawn():
    return digits((300, 60, 60))


def test_digits_are_pictures_of_1024_tokens(drawn):
    assert [part.tokens.shape for part in drawn] == [(300, 1024), (60, 1024), (60, 1024)]
    for part in drawn:
        assert part.tokens.dtype == torch.uint8
        assert int(part.tokens.min()) == 1
        assert int(part.tokens.max()) == 255
        assert bool((part.lengths == 1024).all())


def test_all_digits_are_as_frequent(drawn):
    labels = torch.cat([part.labels for part in drawn])
    shares = labels.bincount() / len(labels)
    assert len(shares) == 10
    assert shares.tolist() == pytest.approx([0.1] * 10, abs=0.06)


def test_a_digit_is_its_original_enlarged_and_moved(monkeypatch):
    """Originals whose brightness is their label: what is bright is 24 by 24 pixels, moved."""
    brightness = 8 + np.arange(40) % 8
    _put(monkeypatch, brightness)
    train = digits((200, 1, 1)).train
    tops, lefts = set(), set()
    for row, label in zip(train.tokens, train.labels.tolist(), strict=True):
        grey, level = row.view(32, 32).double() - 1, 255 * brightness[label] / 16
        bright = grey > level / 2
        rows, columns = (bright.sum(axis).gt(16).nonzero()[:, 0].tolist() for axis in (1, 0))
        assert len(rows) == len(columns) == 24
        tops.add(rows[0])
        lefts.add(columns[0])
        inside = grey[rows[0] :, columns[0] :][:24, :24]
        assert float(inside.median()) == pytest.approx(level, abs=6)
    assert tops == lefts == set(range(9))


def _put(monkeypatch, brightness):
    """Pictures of one brightness each, with their number as the label."""
    images = np.broadcast_to(np.array(brightness, float)[:, None, None], (len(brightness), 8, 8))
    found = SimpleNamespace(images=images.copy(), target=np.arange(len(brightness)))
    monkeypatch.setattr("sklearn.datasets.load_digits", lambda: found)


def test_no_original_is_in_two_splits(monkeypatch):
    _put(monkeypatch, np.zeros(200))
    train, validation, test = (set(part.labels.tolist()) for part in digits((900, 300, 300)))
    assert not train & validation
    assert not train & test
    assert not validation & test
    assert len(validation) <= 20
    assert len(test) <= 20
    assert len(train) > 140


def test_two_pictures_of_one_original_are_not_the_same(monkeypatch):
    _put(monkeypatch, np.full(10, 8.0))
    assert len(digits((50, 1, 1)).train.tokens.unique(dim=0)) == 50


def test_a_seed_gives_the_same_digits_and_another_seed_others(drawn):
    again, other = (digits((300, 60, 60), seed=seed) for seed in (0, 1))
    for one, same in zip(drawn, again, strict=True):
        assert torch.equal(one.tokens, same.tokens)
        assert torch.equal(one.labels, same.labels)
    assert not torch.equal(drawn.train.labels, other.train.labels)


def test_without_scikit_learn_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match=r"pip install scikit-learn.*or give a folder"):
        digits((3, 1, 1))


def _pictures(count, seed):
    """Rows of the binary format: a label, then red, green and blue of all pixels."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (count, SIZE), dtype=np.uint8)
    rows[:, 0] %= 10
    return rows


def _write(folder, counts):
    rows = [_pictures(count, seed) for seed, count in enumerate(counts)]
    for name, found in zip(FILES, rows, strict=True):
        found.tofile(folder / name)
    return rows


class Folder(NamedTuple):
    """One that is whole, what it holds, and what is read from it."""

    path: Path
    rows: list[np.ndarray]
    splits: Splits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cifar")
    rows = _write(path, [1002, 1001, 1002, 1001, 1002, 7])
    return Folder(path, rows, cifar(path))


def test_the_last_5000_pictures_for_training_are_for_validation(folder):
    _, rows, splits = folder
    assert [len(part.labels) for part in splits] == [8, 5000, 7]
    assert [part.tokens.shape for part in splits] == [(8, 1024), (5000, 1024), (7, 1024)]
    labels = np.concatenate([found[:, 0] for found in rows])
    assert torch.cat([part.labels for part in splits]).tolist() == labels.tolist()


def test_pictures_are_grey_as_the_eye_sees_them_a_row_after_another(folder):
    _, rows, splits = folder
    red, green, blue = np.moveaxis(rows[-1][:, 1:].reshape(7, 3, 1024).astype(float), 1, 0)
    grey = 0.299 * red + 0.587 * green + 0.114 * blue
    tokens = splits.test.tokens.double().numpy()
    assert np.abs(tokens - 1 - grey.clip(0, 254)).max() <= 0.5 + 1e-3


def test_plain_pictures_have_one_token(folder, tmp_path):
    colours = {
        (0, 0, 0): 1,
        (253, 253, 253): 254,
        (254, 254, 254): 255,
        (255, 255, 255): 255,
        (255, 0, 0): 77,
        (0, 255, 0): 151,
        (0, 0, 255): 30,
    }
    for file in FILES[:-1]:
        (tmp_path / file).symlink_to(folder.path / file)
    rows = _pictures(len(colours), seed=0)
    rows[:, 1:] = np.repeat(list(colours), 1024, axis=1)
    rows.tofile(tmp_path / FILES[-1])
    tokens = cifar(tmp_path).test.tokens
    assert [row.unique().tolist() for row in tokens] == [[token] for token in colours.values()]


@pytest.mark.parametrize("missing", FILES)
def test_a_folder_without_one_of_the_files_says_which(tmp_path, missing):
    _write(tmp_path, [1] * 6)
    (tmp_path / missing).unlink()
    with pytest.raises(ValueError, match=f"has no {missing}; the archive cifar-10-binary.tar.gz"):
        cifar(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere must hold CIFAR-10's binary version"):
        cifar(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "kept"), [*((FILES[0], kept) for kept in (0, 1, SIZE - 1, SIZE + 1)), (FILES[-1], 1)]
)
def test_a_damaged_file_is_named(folder, tmp_path, name, kept):
    for file in FILES:
        if file == name:
            (tmp_path / file).write_bytes((folder.path / file).read_bytes()[:kept])
        else:
            (tmp_path / file).symlink_to(folder.path / file)
    with pytest.raises(ValueError, match=f"{name} does not hold whole pictures of 3073 bytes"):
        cifar(tmp_path)


def test_too_few_pictures_to_learn_from_are_refused(tmp_path):
    _write(tmp_path, [3] * 6)
    with pytest.raises(ValueError, match="pictures"):
        cifar(tmp_path)
