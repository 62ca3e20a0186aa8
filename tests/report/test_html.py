"""The page stands alone and says what the records say."""

from __future__ import annotations

import base64
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from rankone.report.captions import CAPTIONS
from rankone.report.html import report_html
from rankone.report.layout import MARK

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
VOID = {"meta", "img", "br", "hr", "link"}


class Page(HTMLParser):
    """Checks that elements nest, and keeps attributes, texts and the cells' classes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)

    def values(self, tag: str, name: str) -> list[str | None]:
        return [value for t, n, value in self.attributes if (t, n) == (tag, name)]


@pytest.fixture
def page(table) -> str:
    config = {"preset": "paper", "versions": {"torch": "2.13.0"}}
    figures = dict.fromkeys(CAPTIONS, PNG)
    return report_html("Table 1 & figures", table, figures, config, ["2 members were restarted."])


def test_the_page_parses_and_needs_nothing_else(page):
    parsed = Page(page)
    assert parsed.open == []
    assert "http://" not in page
    assert "https://" not in page
    assert "url(" not in page
    assert "@import" not in page
    assert "<script" not in page
    sources = parsed.values("img", "src")
    assert len(sources) == 7
    assert all(source.startswith("data:image/png;base64,") for source in sources)


def test_the_page_has_a_title_and_alternative_texts(page):
    parsed = Page(page)
    assert parsed.text["title"] == ["Table 1 & figures"]
    assert parsed.values("img", "alt") == [title for title, _ in CAPTIONS.values()]
    assert parsed.values("html", "lang") == ["en"]


def test_the_page_shows_ours_the_published_value_and_the_floor(page, published_text):
    parsed = Page(page)
    shown = [text.strip("()") for text in parsed.text["small"]]
    assert shown == [value for row in published_text for value in row]
    assert "Bayes (floor)" in parsed.text["th"]
    assert "2 members were restarted." in page
    assert "2.13.0" in parsed.text["pre"][0]


def test_cells_are_tinted_and_marked_by_their_limits(table):
    worse = [{**record, "within": record["noise"] != "sigma_4"} for record in table]
    page = Page(report_html("t", worse, {}, {}, []))
    classes = page.values("td", "class")
    assert classes.count("worse") == 24
    assert classes.count("better") == 216 - 3  # the closed forms without noise are equal: zero
    assert sum(text.rstrip().endswith(MARK) for text in page.text["td"]) == 24
    assert "216 of 240 cells keep their limits; 24 outside." in page.text["p"]


def test_all_text_is_escaped(table):
    bad = "<b>&\"'"
    page = report_html(bad, table, {bad: PNG}, {bad: bad}, [bad])
    assert "<b>" not in page
    assert Page(page).text["title"] == [bad]


def test_a_page_without_a_table_or_figures_is_still_a_page():
    assert Page(report_html("empty", [], {}, {}, [])).open == []


def test_tables_and_page_import_neither_torch_nor_matplotlib():
    code = (
        "import sys, rankone.report.html, rankone.report.tables\n"
        "print(sorted({'torch', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
