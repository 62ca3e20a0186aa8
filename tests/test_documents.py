"""The code in the documents runs, and what they say is there is there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from rankone.icl.training import Recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES.append(ROOT / "benchmarks/README.md")

PAGES_WITH_CODE = ["README.md"]
PAGES_WITH_CODE += [
    f"docs/{name}.md" for name in ("laboratory", "mechanisms", "operations", "theory")
]


def code_of(page: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


@pytest.mark.parametrize("page", PAGES_WITH_CODE)
def test_code_runs_from_top_to_bottom(page):
    code = code_of(page)
    assert code
    exec(compile(code, page, "exec"), {"__name__": page})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_files_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def test_every_file_of_the_readmes_tree_exists():
    (tree,) = re.findall(
        r"## What is where\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    folders: list[str] = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        path = ROOT.joinpath(*folders[:depth], name)
        assert path.is_dir() if name.endswith("/") else path.is_file(), path
        folders[depth:] = [name]


def test_the_laboratory_page_explains_every_part_of_the_recipe():
    text = (ROOT / "docs/laboratory.md").read_text(encoding="utf-8")
    missing = [field.name for field in fields(Recipe) if f"`{field.name}`" not in text]
    assert not missing
