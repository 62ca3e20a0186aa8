"""The generated pages say what the result files say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rankone.icl.docs_page import reproduction_page, results_block, write_pages
from rankone.icl.published import NOISES, table1
from rankone.report.pages import replace_block

STAMP = {
    "command": "rankone icl reproduce all --preset paper",
    "device": "a machine",
    "versions": {"python": "3.11.9", "torch": "2.13.0"},
    "date": "2025-01-02T03:04:05+00:00",
    "commit": "0123abc",
    "seconds": 312.0,
    "stages": {"training": 205.1, "evaluation": 20.4},
    "other_cores": 0.02,
}


def cell(model: str, layers: int | None, noise: str, published: float) -> dict[str, Any]:
    """Two percent below the published value, the floor another fifth below that."""
    return {
        "model": model,
        "layers": layers,
        "noise": noise,
        "adjusted_loss": 0.98 * published,
        "standard_error": 0.0004,
        "published": published,
        "floor": 0.8 * table1()["full", 7, noise],
        "published_standard_error": 0.003,
        "limit": published + 0.006,
        "within": True,
        "seeds": 5,
    }


def write(path: Path, records: list[dict[str, Any]], **changes: Any) -> Path:
    path.write_text(json.dumps({**STAMP, **changes, "records": records}))
    return path


@pytest.fixture
def records() -> list[dict[str, Any]]:
    cells = [cell(*key, value) for key, value in table1().items()]
    eighth = cell("full", 8, "sigma_5", 0.04) | {"published": None, "within": None, "limit": None}
    floors = [
        cell("bayes", None, noise, 1.0)
        | {"published": None, "within": None, "limit": None, "adjusted_loss": 0.0397}
        for noise in NOISES
    ]
    return [*cells, eighth, *floors]


@pytest.fixture
def bench() -> list[dict[str, Any]]:
    def record(measure: str, impl: str, drawing: bool, context: int, ms: float) -> dict[str, Any]:
        facts = {"kind": "full", "layers": 3, "drawing": drawing, "context": context, "ms": ms}
        return {"measure": measure, "impl": impl, **facts, "times_token": 30 / ms}

    return [
        {"measure": "parity", "kind": "full", "layers": 3, "check": "loss", "error": 1e-7},
        record("step", "token", False, 20, 30.0),
        record("step", "fused_cpu", False, 20, 7.5),
        record("step", "fused_cpu", True, 20, 10.0),
        record("context", "fused_cpu", True, 20, 2.0),
        record("context", "fused_cpu", True, 20000, 2.1),
    ]


def test_all_cells_within_are_counted(tmp_path, records):
    page = reproduction_page({"paper": write(tmp_path / "t.json", records)})
    assert "**210 of 210 trained cells**" in page
    assert "30 of 30 closed-form cells" in page
    assert "Cells that are not" not in page
    for fact in ("a machine", "5 min 12 s", "torch 2.13.0", "2025-01-02", "0123abc"):
        assert fact in page


def test_a_cell_above_its_limit_is_listed_with_its_excess(tmp_path, records):
    chosen = next(r for r in records if (r["model"], r["layers"]) == ("diag", 4))
    chosen |= {"noise": chosen["noise"], "adjusted_loss": 0.03, "limit": 0.02, "within": False}
    page = reproduction_page({"paper": write(tmp_path / "t.json", records)})
    assert "**209 of 210 trained cells**" in page
    row = next(line for line in page.splitlines() if line.startswith("| DIAG | 4 |"))
    assert "0.0100 (50.0%)" in row


def test_a_cell_without_a_finite_loss_is_listed(tmp_path, records):
    records[0] |= {"adjusted_loss": None, "within": False, "standard_error": None}
    page = reproduction_page({"paper": write(tmp_path / "t.json", records)})
    assert "not finite" in page


def test_ratios_to_the_floor_are_those_of_the_deepest_published_row(tmp_path, records):
    page = reproduction_page({"paper": write(tmp_path / "t.json", records)})
    assert "FULL with 7 layers over the Bayes floor" in page
    assert "| " + " | ".join(["1.225"] * len(NOISES)) + " |" in page


def test_both_presets_and_the_benchmark_are_shown(tmp_path, records, bench):
    laptop = [r for r in records if r["noise"] in ("sigma_5", "set_1_3") and r["layers"] != 7]
    page = reproduction_page(
        {
            "paper": write(tmp_path / "a.json", records),
            "laptop": write(tmp_path / "b.json", laptop),
            "bench-cpu": write(tmp_path / "c.json", bench, command="rankone bench icl"),
        }
    )
    headings = re.findall(r"^## (.*)", page, re.MULTILINE)
    assert headings[:3] == ["The whole table", "The laptop preset", "The training step"]
    assert "| of it | training 3 min 25 s, evaluation 20.4 s |" in page
    assert "has 4.0 times the throughput" in page
    assert "2.10 ms at n = 20,000" in page


def test_the_summary_has_ours_beside_the_published_value(tmp_path, records, bench):
    block = results_block(
        {
            "paper": write(tmp_path / "t.json", records),
            "bench-cpu": write(tmp_path / "c.json", bench),
        }
    )
    assert "| FULL, 7 layers | 0.0461 (0.047) | 0.0098 (0.010) |" in block
    assert "| Bayes (floor) | 0.0397 | 0.0397 |" in block
    assert "5 min 12 s on a machine" in block
    assert "4.0 times the throughput" in block


def test_times_of_a_busy_machine_are_not_shown(tmp_path, bench):
    page = reproduction_page({"bench-cpu": write(tmp_path / "c.json", bench, other_cores=1.3)})
    assert "times the throughput" not in page
    assert "that machine was not idle" in page


def test_without_results_the_pages_say_so():
    assert "No results are here yet" in reproduction_page({})
    assert "No results are here yet" in results_block({})


def test_only_the_block_of_the_readme_changes(tmp_path, records):
    (tmp_path / "src/rankone").mkdir(parents=True)
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    write(tmp_path / "benchmarks/results/table1.json", records)
    readme = tmp_path / "README.md"
    readme.write_text("# Top\n<!-- results -->\nold\n<!-- /results -->\n# Bottom\n")
    write_pages(tmp_path)
    once = readme.read_text()
    assert once.startswith("# Top\n<!-- results -->\nAdjusted loss")
    assert once.endswith("<!-- /results -->\n# Bottom\n")
    assert (tmp_path / "docs/reproduction.md").exists()
    write_pages(tmp_path)
    assert readme.read_text() == once


def test_a_readme_without_marks_and_a_foreign_folder_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must hold <!-- results -->"):
        replace_block("nothing", "block")
    with pytest.raises(ValueError, match="not a checkout"):
        write_pages(tmp_path)


def test_a_file_that_is_no_result_is_refused(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="not a result file"):
        reproduction_page({"paper": path})
