"""The table of mechanisms says what layers can do and what they keep."""

from __future__ import annotations

import pytest
import torch

from rankone.layers import MECHANISMS, Softmax
from rankone.report import mechanisms
from rankone.report.mechanisms import COLUMNS, PAGES, markdown, rows, show, state_size, write_pages
from rankone.report.pages import replace_block

SMALL = {"dim": 16, "heads": 2, "tokens": 40}
D, H, T = SMALL.values()
K = D // H


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Threads that wait for each other are slow where other programs are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small():
    return rows(**SMALL)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(mechanisms, "markdown", lambda: "the table")
    (tmp_path / "docs").mkdir()
    for name in PAGES:
        text = f"# {name}\n<!-- mechanisms -->\nold\n<!-- /mechanisms -->\nThe end.\n"
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_mechanism_has_a_row_with_its_facts(small):
    assert [row["name"] for row in small] == list(MECHANISMS)
    for row in small:
        facts = MECHANISMS[row["name"]].facts
        assert set(row) == set(COLUMNS)
        assert row["mechanism"] == facts.title
        assert [row[name] for name in ("cost", "exact", "paper")] == [
            facts.cost, facts.exact, facts.paper,
        ]  # fmt: skip
        for name in ("causal", "streams", "cross"):
            assert row[name] == {True: "yes", False: "no"}[getattr(facts, name)]


def test_the_state_is_counted_where_there_is_one(small):
    for row in small:
        facts = MECHANISMS[row["name"]].facts
        size = f"{state_size(row['name'], **SMALL):,} ({facts.state})" if facts.streams else "–"
        assert row["state"] == size


def test_what_does_not_stream_has_no_state(monkeypatch):
    monkeypatch.setattr(Softmax, "facts", Softmax.facts._replace(streams=False))
    row = rows(**SMALL)[0]
    assert (row["causal"], row["streams"], row["state"]) == ("yes", "no", "–")


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("linear", {}, H * (K * K + K)),
        ("performer", {"features": 24}, H * (24 * K + 24)),
        ("rfa", {"features": 12}, H * (2 * 12 * K + 2 * 12 + 1)),
        ("softmax", {}, 2 * T * D),
        ("longformer", {"window": 6, "dilation": 3}, 2 * 18 * D),
        ("longformer", {"window": 100}, 2 * T * D),
        ("long_short", {"rank": 2, "window": 6, "chunk": 7}, 2 * 5 * 2 * D + 2 * 6 * D + 5 * D),
    ],
)
def test_states_have_the_size_of_their_formula(name, options, size):
    assert state_size(name, **SMALL, **options) == size


@pytest.mark.parametrize("name", ["linear", "performer", "rfa"])
def test_states_of_features_do_not_grow(name):
    sizes = {state_size(name, dim=D, heads=H, tokens=tokens) for tokens in (1, 40, 1500)}
    assert len(sizes) == 1


def test_tokens_beyond_one_part_are_counted():
    assert state_size("softmax", dim=4, heads=1, tokens=1500) == 2 * 1500 * 4


def test_the_table_shows_all_mechanisms(capsys):
    show(**SMALL)
    text = capsys.readouterr().out
    assert "D = 16, H = 2, behind 40 tokens" in text
    for name, mechanism in MECHANISMS.items():
        (line,) = (line for line in text.splitlines() if line.split()[:1] == [name])
        assert mechanism.facts.title in line
        assert mechanism.facts.paper in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 0}, "heads must divide dim, got 0 and 2"),
        ({"heads": 0}, "heads must divide dim, got 16 and 0"),
        ({"heads": 3}, "heads must divide dim, got 16 and 3"),
        ({"tokens": 0}, "tokens must be at least 1, got 0"),
    ],
)
def test_wrong_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        show(**SMALL | change)


def test_a_page_has_the_rows_of_the_table(small, monkeypatch):
    monkeypatch.setattr(mechanisms, "rows", lambda: small)
    head, _, *lines = markdown().split("\n\n")[0].splitlines()
    assert head.strip("| ").split(" | ") == list(COLUMNS)
    cells = [line.strip("| ").split(" | ") for line in lines]
    assert cells == [[f"`{row['name']}`", *list(row.values())[1:]] for row in small]


def test_pages_get_the_table_between_their_marks(checkout):
    assert write_pages(checkout) == [checkout / name for name in PAGES]
    for name in PAGES:
        assert (checkout / name).read_text() == (
            f"# {name}\n<!-- mechanisms -->\nthe table\n<!-- /mechanisms -->\nThe end.\n"
        )


@pytest.mark.parametrize("missing", PAGES)
def test_only_a_checkout_has_the_pages(checkout, missing):
    (checkout / missing).unlink()
    with pytest.raises(ValueError, match="not a checkout"):
        write_pages(checkout)
    (other,) = set(PAGES) - {missing}
    assert "old" in (checkout / other).read_text()


def test_a_page_without_marks_is_refused(checkout):
    (checkout / PAGES[0]).write_text("no marks")
    with pytest.raises(ValueError, match="must hold <!-- mechanisms -->"):
        write_pages(checkout)


def test_only_what_is_between_the_marks_of_that_name_changes():
    other = "<!-- speed -->\nfast\n<!-- /speed -->"
    text = f"a\n<!-- results -->\nold\nlines\n<!-- /results -->\n{other}\nb"
    want = f"a\n<!-- results -->\n\\1 new\n<!-- /results -->\n{other}\nb"
    assert replace_block(text, "\\1 new") == want
    assert replace_block(want, "\\1 new") == want


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "<!-- x -->",
        "<!-- /x -->",
        "<!-- /x --> <!-- x -->",
        "<!-- x --> <!-- x --> <!-- /x -->",
        "<!-- x --> <!-- /x --> <!-- /x -->",
        "<!-- y --> <!-- /y -->",
    ],
)
def test_marks_that_are_no_pair_are_refused(text):
    with pytest.raises(ValueError, match="<!-- x --> and then <!-- /x -->, each once"):
        replace_block(text, "new", "x")
