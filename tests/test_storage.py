import json
import os
import stat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankone import storage


def test_text_bytes_and_json_come_back_as_written(tmp_path):
    storage.write_text(tmp_path / "new" / "a.txt", "σ = ½\n")
    storage.write_bytes(tmp_path / "b.bin", b"\x00\xff")
    storage.write_json(tmp_path / "c.json", {"σ": [1, 2.5, None, "x"]})
    assert (tmp_path / "new" / "a.txt").read_text(encoding="utf-8") == "σ = ½\n"
    assert (tmp_path / "b.bin").read_bytes() == b"\x00\xff"
    assert storage.read_json(tmp_path / "c.json") == {"σ": [1, 2.5, None, "x"]}


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # Lone surrogates are no text that UTF-8 can hold.
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda values: (
        st.lists(values, max_size=3) | st.dictionaries(st.text("abσ"), values, max_size=3)
    ),
    max_leaves=8,
)


@given(json_values)
def test_json_round_trip_is_exact(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "x.json"
    storage.write_json(path, value)
    assert storage.read_json(path) == value


def test_nothing_but_the_file_is_left_behind(tmp_path):
    for text in ("one", "two"):
        storage.write_text(tmp_path / "a.txt", text)
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.skipif(os.name != "posix", reason="file modes are a POSIX matter")
def test_files_follow_the_umask(tmp_path):
    before = os.umask(0o022)
    try:
        storage.write_text(tmp_path / "a.txt", "")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o644


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, step, failure):
    path = tmp_path / "a.txt"
    storage.write_text(path, "old")

    def fail(*_args):
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(type(failure)):
            storage.write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, object()])
def test_what_json_cannot_hold_is_refused_and_the_old_file_stays(tmp_path, value):
    path = tmp_path / "a.json"
    storage.write_json(path, {"old": 1})
    with pytest.raises(ValueError, match=r"a\.json: cannot be written as JSON"):
        storage.write_json(path, {"new": value})
    assert storage.read_json(path) == {"old": 1}


def test_tensors_and_metadata_come_back_as_written(tmp_path):
    path = tmp_path / "m.safetensors"
    whole = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    tensors = {
        "transposed": whole.T,  # not contiguous
        "row": whole[1],  # shares memory
        "whole": whole.requires_grad_(),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "steps": torch.tensor(7),
        "empty": torch.empty(0, 3),
    }
    storage.write_tensors(path, tensors, {"kind": "full"})
    read, metadata = storage.read_tensors(path)
    assert metadata == {"kind": "full"}
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert not read[name].requires_grad
        assert torch.equal(read[name], tensor)


def test_tensors_outlive_their_file(tmp_path):
    path = tmp_path / "m.safetensors"
    storage.write_tensors(path, {"a": torch.ones(1000)})
    read, metadata = storage.read_tensors(path)
    path.write_bytes(b"")
    assert metadata == {}
    assert torch.equal(read["a"], torch.ones(1000))


def assert_one_line_that_names(error, path):
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 20, 60, -1])
def test_truncated_tensors_are_a_value_error(tmp_path, keep):
    path = tmp_path / "m.safetensors"
    storage.write_tensors(path, {"a": torch.ones(100)}, {"kind": "full"})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"truncated or not safetensors.*make it again") as error:
        storage.read_tensors(path)
    assert_one_line_that_names(error, path)


@pytest.mark.parametrize("content", [b"hello world, this is text", b"\xff" * 100, b"\x00" * 100])
def test_foreign_bytes_are_no_tensors(tmp_path, content):
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="truncated or not safetensors") as error:
        storage.read_tensors(path)
    assert_one_line_that_names(error, path)


def test_pickles_are_not_read(tmp_path):
    path = tmp_path / "m.safetensors"
    torch.save({"a": torch.ones(3)}, path)
    with pytest.raises(ValueError, match="truncated or not safetensors"):
        storage.read_tensors(path)


whole_json = json.dumps({"a": [1, 2, 3], "b": {"c": "text"}}, indent=2).encode()


@pytest.mark.parametrize("keep", range(len(whole_json)))
def test_truncated_json_is_a_value_error(tmp_path, keep):
    path = tmp_path / "c.json"
    path.write_bytes(whole_json[:keep])
    with pytest.raises(ValueError, match=r"truncated or not JSON.*make it again") as error:
        storage.read_json(path)
    assert_one_line_that_names(error, path)


@pytest.mark.parametrize(
    "content", [b"{'a': 1}", b"\xff\xfe", b"NaN", b'{"a": Infinity}', b"[" * 100_000, b" \n"]
)
def test_malformed_json_is_a_value_error(tmp_path, content):
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="truncated or not JSON") as error:
        storage.read_json(path)
    assert_one_line_that_names(error, path)


@pytest.mark.parametrize("read", [storage.read_json, storage.read_tensors])
def test_missing_files_and_folders_are_a_value_error(tmp_path, read):
    with pytest.raises(ValueError, match="no such file") as error:
        read(tmp_path / "nothing")
    assert_one_line_that_names(error, tmp_path / "nothing")
    with pytest.raises(ValueError, match="cannot be read") as error:
        read(tmp_path)
    assert_one_line_that_names(error, tmp_path)
