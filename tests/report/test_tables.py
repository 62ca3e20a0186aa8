"""Table 1 in all its forms holds the same numbers."""

from __future__ import annotations

import csv
import io
import re

import pytest
from rich.console import Console

from rankone.report.layout import MARK, arrange
from rankone.report.records import NothingToShowError, TableRecord, parse_noise
from rankone.report.tables import (
    read_table1_csv,
    table1_csv,
    table1_latex,
    table1_markdown,
    table1_text,
)


def cell_lines(text: str, label: str) -> list[str]:
    return [line for line in text.splitlines() if f" {label} " in line]


def printed(width: int, table: list[TableRecord]) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table1_text(table, width))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_every_published_value_is_in_the_markdown(table, published_text):
    text = table1_markdown(table)
    lines = [line for line in text.splitlines() if re.search(r"GD\+\+|DIAG|FULL|RR \|", line)]
    shown = [re.findall(r"\(([^)]*)\)", line) for line in lines]
    assert shown == published_text


def test_rows_and_columns_stand_in_the_papers_order(table):
    grid = arrange(reversed(table))
    labels = [(row.group, row.label) for row in grid.rows]
    assert [noise.name for noise in grid.noises][-3:] == ["sigma_7", "set_1_3", "set_1_3_5"]
    assert labels[:4] == [
        ("1 layer", "GD++"),
        ("1 layer", "DIAG"),
        ("1 layer", "FULL"),
        ("2 layers", "GD++"),
    ]
    assert [label for _, label in labels[-4:]] == ["ConstRR", "AdaRR", "TunedRR", "Bayes (floor)"]


def test_latex_braces_and_environments_balance(table):
    text = table1_latex(table)
    depth = 0
    for character in text.replace(r"\{", "").replace(r"\}", ""):
        depth += (character == "{") - (character == "}")
        assert depth >= 0
    assert depth == 0
    assert re.findall(r"\\begin{(\w+)}", text) == re.findall(r"\\end{(\w+)}", text)[::-1]
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.count("&") for line in rows} == {11}
    assert text.isascii()


@pytest.mark.parametrize(
    ("write", "bold"),
    [(table1_latex, r"\\textbf{([^}]*)}"), (table1_markdown, r"\*\*([^*]*)\*\*")],
    ids=["latex", "markdown"],
)
def test_the_best_of_each_column_is_bold(table, write, bold):
    records = [record for record in table if record["noise"] == "sigma_6"]
    best = min(record["adjusted_loss"] for record in records)
    assert re.findall(bold, write(records)) == [f"{best:.4f}"]


def test_values_that_print_alike_share_the_bold(table):
    records = [record for record in table if record["noise"] == "sigma_0"]
    assert table1_markdown(records).count("**0** (0)") == 3


def test_the_floor_is_never_bold(table):
    records = [TableRecord(**{**record, "floor": 1e-9}) for record in table]
    (line,) = cell_lines(table1_markdown(records), "Bayes (floor)")
    assert "1.00e-09" in line
    assert "**" not in line


def test_the_csv_round_trips(table):
    assert read_table1_csv(table1_csv(table)) == table


def test_the_csv_leaves_what_is_not_known_empty():
    record = TableRecord(
        model="full",
        layers=8,
        noise="sigma_5",
        adjusted_loss=0.04,
        standard_error=0.001,
        published=None,
        floor=None,
    )
    (row,) = csv.DictReader(io.StringIO(table1_csv([record])))
    assert row["published"] == row["limit"] == row["within"] == ""
    assert read_table1_csv(table1_csv([record]))[0]["published"] is None


@pytest.mark.parametrize("write", [table1_markdown, table1_latex])
def test_a_value_worse_than_its_limit_is_marked(table, write):
    mark = MARK if write is table1_markdown else r"\textdagger"
    worse = [{**record, "within": record["noise"] != "sigma_4"} for record in table]
    assert write(table).count(mark) == 1
    assert write(worse).count(mark) == 1 + 24


def test_the_limit_counts_where_nothing_was_decided(table):
    record = {**table[0], "within": None, "limit": table[0]["adjusted_loss"] / 2}
    assert MARK in table1_markdown([record]).splitlines()[2]


def test_a_model_without_a_finite_loss_is_shown_and_marked(table):
    record = {**table[0], "within": None, "adjusted_loss": None}
    assert f"n/a {MARK} (1.768)" in table1_markdown([record])


def test_a_missing_cell_and_a_missing_published_value_are_no_error(table):
    deep = TableRecord(
        model="full",
        layers=8,
        noise="sigma_5",
        adjusted_loss=0.0411,
        standard_error=0.001,
        published=None,
        floor=0.0397,
    )
    line = cell_lines(table1_markdown([*table, deep]), "FULL")[-1]
    assert "**0.0411**" in line
    assert line.count("–") == 9


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_terminal_table_keeps_to_its_width(table, width):
    text = printed(width, table)
    assert max(map(len, text.splitlines())) <= width
    assert "0.0490 (0.050)" in text
    assert "2.45e-12 (2.50e-12)" in text
    assert text.count("…") == 0


def test_the_caption_tells_the_number_of_seeds(table):
    assert "best of 5 seeds" in table1_markdown(table)
    assert "one seed" in table1_markdown([{**record, "seeds": 1} for record in table])


def test_two_records_for_one_cell_are_refused(table):
    with pytest.raises(ValueError, match=r"two records for \('gd\+\+', 1, 'sigma_0'\)"):
        table1_markdown([*table, table[0]])


def test_an_empty_table_is_refused():
    with pytest.raises(NothingToShowError, match="no records"):
        table1_latex([])


def test_an_unknown_noise_is_refused():
    with pytest.raises(ValueError, match="noise must look like 'sigma_5' or 'set_1_3'"):
        parse_noise("uniform")
