import sys
from types import ModuleType

import numba
import pytest
import torch

import rankone
from rankone.doctor import doctor, examine


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """Stand in for the choice of an implementation; return what was asked of it."""
    questions = []

    def choose(impl, device, dim):
        questions.append((impl, device.type, dim))
        return f"best_{device.type}", "it is the fastest here"

    gradients = ModuleType("rankone.icl.gradients")
    gradients.choose = choose
    monkeypatch.setitem(sys.modules, "rankone.icl.gradients", gradients)
    return questions


def test_the_examination_covers_every_section():
    findings = examine()
    sections = list(dict.fromkeys(finding.section for finding in findings))
    assert sections == ["versions", "devices", "threads", "installed", "choices"]
    values = {(finding.section, finding.name): finding.value for finding in findings}
    assert values["versions", "rankone"] == rankone.__version__
    assert values["versions", "torch"] == str(torch.__version__)
    assert values["threads", "torch"] == str(torch.get_num_threads())
    assert values["threads", "numba"] == str(numba.get_num_threads())
    assert values["installed", "numba"] == numba.__version__
    assert "GiB" in values["devices", "cpu"]


def test_every_device_is_told_what_auto_would_choose_and_why(asked):
    choices = [finding for finding in examine() if finding.section == "choices"]
    assert len(choices) == 2 * (1 + torch.cuda.device_count())
    assert choices[0].name == "gradients on cpu"
    assert choices[0].value == "best_cpu: it is the fastest here"
    assert asked[0] == ("auto", "cpu", 10)


def test_what_is_missing_is_said_with_its_purpose(monkeypatch):
    monkeypatch.setattr("rankone.doctor.installed_version", lambda _name: None)
    installed = [finding for finding in examine() if finding.section == "installed"]
    assert all(finding.value.startswith("no (for ") for finding in installed)


def test_a_pipe_gets_one_plain_line_a_finding(capsys):
    doctor()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(examine())
    assert lines[0] == f"versions: rankone: {rankone.__version__}"


def test_a_terminal_gets_tables(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    doctor()
    out = capsys.readouterr().out
    assert "│" in out
    assert "it is the fastest here" in out
