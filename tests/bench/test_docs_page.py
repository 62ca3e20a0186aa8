"""The table of speeds says what the result files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankone.bench.docs_page import readme_block, speed_block, write_page


@pytest.fixture
def result(run):
    return json.loads(run(op="delta_rule").read_text())


@pytest.fixture
def checkout(tmp_path) -> Path:
    for folder in ("docs", "src/rankone", "benchmarks/results"):
        (tmp_path / folder).mkdir(parents=True)
    page = "# Operations\n\n<!-- speed -->\nold\n<!-- /speed -->\n\nThe end.\n"
    (tmp_path / "docs/operations.md").write_text(page)
    (tmp_path / "README.md").write_text("<!-- speed -->\nold\n<!-- /speed -->\n")
    (tmp_path / "docs/kernels.md").write_text("<!-- kernels -->\nold\n<!-- /kernels -->\n")
    return tmp_path


def test_every_shape_and_pass_has_a_row(result):
    block = speed_block([result])
    assert f"**{result['device']}**" in block
    for name in ("forward", "both passes"):
        for length in (48, 96):
            assert f"| {name} | 1 | {length} |" in block
    assert "softmax attention" in block


def test_times_stand_as_they_were_measured(result):
    for record in result["records"]:
        record["ms"] = 12.345 if record["impl"] == "chunked" else 0.5
    row = next(line for line in speed_block([result]).splitlines() if line.startswith("| forward"))
    assert row.split("|")[4:7] == [" 12.3 ", " 12.3 ", " 0.500 "]


def test_peers_above_the_limit_are_named(result):
    assert "Above the limit" not in speed_block([result])
    wrong = next(r for r in result["parity"] if r["impl"] == "sdpa")
    wrong |= {"within": False, "gradient_error": 0.0123}
    assert (
        "Above the limit for errors: softmax attention (delta_rule, gradient error 0.0123)."
        in speed_block([result])
    )


def test_times_of_a_busy_machine_are_not_shown(result):
    block = speed_block([result | {"other_cores": 0.7}])
    assert "not shown" in block
    assert "| forward" not in block


def test_without_results_the_section_says_so(checkout):
    page = write_page(checkout).read_text()
    assert "Nothing was measured yet" in page
    assert "old" not in page
    assert page.endswith("The end.\n")


def test_the_section_is_written_from_the_files_that_are_there(checkout, result):
    (checkout / "benchmarks/results/ops-cpu.json").write_text(json.dumps(result))
    assert "| both passes | 1 | 96 |" in write_page(checkout).read_text()


def test_the_readme_tells_the_range_of_the_ratios(checkout, result):
    assert "Nothing was measured yet" in readme_block([result])
    for record in result["records"]:
        record["T"] *= 100
        if record["impl"] == "chunked":
            record |= {"times_sdpa": 2.5 if record["T"] == 4800 else 7.0}
    text = readme_block([result])
    assert "`delta_rule` softmax attention 2.50 to 7.00 (forward), 2.50 to 7.00 (both" in text
    (checkout / "benchmarks/results/ops-cpu.json").write_text(json.dumps(result))
    write_page(checkout)
    assert text in (checkout / "README.md").read_text()


def test_the_kernels_of_the_chosen_layouts_have_rows(checkout, result):
    head = {name: result[name] for name in ("command", "device", "versions", "date", "commit")}
    facts = {"op": "delta_rule", "B": 1, "T": 2048, "decay": True, "change": {}}
    times = {"forward_ms": 0.5, "forward_kernels": {"solve 1": 0.2, "scan 1": 0.3}}
    times |= {"backward_ms": 1.5, "backward_kernels": {"local 1": 1.25}}
    records = [facts | times, facts | {"change": {"stages": 3}} | times, facts | {"failed": "no"}]
    path = checkout / "benchmarks/results/op-variants.json"
    path.write_text(json.dumps(head | {"records": records}))
    write_page(checkout)
    rows = [x for x in (checkout / "docs/kernels.md").read_text().splitlines() if "2,048" in x]
    assert rows == [
        "| `delta_rule` | 1 × 2,048 | yes | forward | 0.500 | solve 1 0.200, scan 1 0.300 |",
        "| `delta_rule` | 1 × 2,048 | yes | backward | 1.50 | local 1 1.25 |",
    ]


def test_a_damaged_file_is_refused(checkout):
    (checkout / "benchmarks/results/ops-gpu.json").write_text("{}")
    with pytest.raises(ValueError, match=r"ops-gpu\.json is not a result file"):
        write_page(checkout)


def test_only_a_checkout_has_the_page(tmp_path):
    with pytest.raises(ValueError, match="not a checkout"):
        write_page(tmp_path)
