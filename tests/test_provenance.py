import json
import shutil
import subprocess
import sys
from datetime import datetime

import pytest
import torch

import rankone
from rankone import provenance


def test_everything_is_there_and_json_can_hold_it():
    stamp = provenance.collect()
    assert set(stamp) == {"command", "device", "versions", "date", "commit", "threads"}
    assert json.loads(json.dumps(stamp)) == stamp
    assert stamp["versions"]["rankone"] == rankone.__version__
    assert stamp["versions"]["torch"] == torch.__version__
    assert stamp["threads"] == torch.get_num_threads()
    assert "core" in stamp["device"]
    assert datetime.fromisoformat(stamp["date"]).utcoffset().total_seconds() == 0


def test_the_command_names_the_program_without_its_folder_and_quotes(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/rankone", "icl", "--out", "a folder"])
    assert provenance.collect()["command"] == "rankone icl --out 'a folder'"


def test_the_module_run_as_a_program_is_the_command(monkeypatch):
    module = provenance.__file__.replace("provenance.py", "cli.py")
    monkeypatch.setattr(sys, "argv", [module, "doctor"])
    assert provenance.collect()["command"] == "rankone doctor"


def test_what_is_not_installed_has_no_version():
    assert provenance.installed_version("a-package-that-nobody-has") is None
    assert None not in provenance.collect()["versions"].values()


@pytest.mark.gpu
def test_a_gpu_is_called_by_its_name():
    assert provenance.collect("cuda")["device"] == torch.cuda.get_device_name(0)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with one commit that holds a package in src/."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    package = tmp_path / "src"
    package.mkdir()
    (package / "__init__.py").write_text("")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    return package


def test_a_clean_checkout_gives_its_commit(checkout):
    commit = provenance._commit(checkout)
    assert commit is not None
    assert len(commit) == 40
    (checkout.parent / "notes.txt").write_text("outside the package")
    assert provenance._commit(checkout) == commit


@pytest.mark.parametrize("name", ["__init__.py", "new.py"])
def test_a_changed_package_is_dirty(checkout, name):
    (checkout / name).write_text("x = 1\n")
    assert provenance._commit(checkout).endswith("-dirty")


def test_a_copy_inside_another_checkout_has_no_commit(checkout):
    other = checkout.parent / "site-packages"
    other.mkdir()
    (other / "__init__.py").write_text("")
    assert provenance._commit(other) is None


def test_outside_a_checkout_and_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "__init__.py").write_text("")
    assert provenance._commit(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert provenance._commit(tmp_path) is None
    assert provenance.collect()["commit"] is None
