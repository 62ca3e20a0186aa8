import io
from functools import partial

import pytest
from rich.console import Console

from rankone import progress
from rankone.progress import Narrator


def test_without_a_terminal_there_are_lines_and_no_bar(capsys):
    with Narrator() as narrator:
        with narrator.stage("training", 3) as advance:
            advance()
            narrator.say("a [word] in brackets")
        narrator.say("over")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["training: 3 parts", "a [word] in brackets", "over"]


def test_quiet_is_quiet(capsys):
    with Narrator(quiet=True) as narrator, narrator.stage("training", 3) as advance:
        advance()
        narrator.say("nothing")
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_a_bar_says_how_far_it_is(monkeypatch):
    screen = io.StringIO()
    terminal = partial(Console, file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(progress, "Console", lambda *, stderr, quiet: terminal(quiet=quiet))
    with Narrator() as narrator, narrator.stage("training", 7, done=4) as advance:
        advance()
        advance()
        narrator.say("a message")
    shown = screen.getvalue()
    assert "6/7" in shown
    assert "a message" in shown
    assert "parts" not in shown


def test_stages_are_timed_to_where_they_end_or_fail(monkeypatch):
    clock = iter([10.0, 12.5, 20.0, 20.25])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    narrator = Narrator(quiet=True)
    with narrator.stage("first", 1):
        pass
    with pytest.raises(KeyboardInterrupt), narrator.stage("second", 1):
        raise KeyboardInterrupt
    assert narrator.seconds == {"first": 2.5, "second": 0.2}
