"""The speeds in three pages: `python -m rankone.bench.docs_page`.

Writes what stands between the marks `speed` in docs/operations.md and README.md, from
benchmarks/results/ops-gpu.json and ops-cpu.json, and between the marks `kernels` in
docs/kernels.md, from op-variants.json.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rankone.bench.cases import OPS, OURS, PASSES, PEERS, Record
from rankone.bench.summary import LABELS, digits, entries, our_row
from rankone.provenance import TOLERATED_CORES
from rankone.report.pages import replace_block
from rankone.storage import read_json, write_text

FILES = ("ops-gpu.json", "ops-cpu.json")
"""Result files in benchmarks/results."""

PAGE = "docs/operations.md"
KERNELS_FILE = "op-variants.json"
KERNELS_PAGE = "docs/kernels.md"
_LONG = 2048
_PEERS = {
    "fla": "flash-linear-attention",
    "sdpa": "softmax attention",
    "sdpa_cudnn": "softmax attention by cuDNN",
    "transformers": "transformers",
}
_NEEDED = (
    "command",
    "device",
    "versions",
    "date",
    "commit",
    "records",
    "parity",
    "copy_gb_per_s",
)


def speed_block(results: list[dict[str, Any]]) -> str:
    """The section's text: one part for each result."""
    if not results:
        return "Nothing was measured yet: `rankone bench ops` makes the first results."
    return "\n\n".join(_part(result) for result in results)


def write_page(root: Path) -> Path:
    """Writes the section in the checkout at `root`; the page's path."""
    page = root / PAGE
    if not page.is_file() or not (root / "src/rankone").is_dir():
        raise ValueError(f"{root.resolve()} is not a checkout of rankone: run this in its root")
    paths = [root / "benchmarks/results" / name for name in FILES]
    results = [_load(path) for path in paths if path.is_file()]
    _fill(page, speed_block(results), "speed")
    _fill(root / "README.md", readme_block(results), "speed")
    variants, kernels = root / "benchmarks/results" / KERNELS_FILE, root / KERNELS_PAGE
    if variants.is_file():
        _fill(kernels, kernel_block(variants), "kernels")
    return page


def _fill(page: Path, block: str, mark: str) -> None:
    write_text(page, replace_block(page.read_text(encoding="utf-8"), block, mark))


def readme_block(results: list[dict[str, Any]]) -> str:
    """A sentence for each result: how many times as long the peers take from 2,048 tokens on."""
    told = [
        _sentence(result) for result in results if any(r["T"] >= _LONG for r in result["records"])
    ]
    return "\n".join(told) or "Nothing was measured yet."


def _sentence(result: dict[str, Any]) -> str:
    records = [r for r in result["records"] if r["T"] >= _LONG and not r["decay"]]
    parts = []
    for op in OPS:
        for peer in PEERS:
            told = []
            for name in PASSES:
                mine = [r for r in records if (r["op"], r["pass"]) == (op, name)]
                best = [r for r in mine if r["impl"] == ("triton" if _fused(mine) else "chunked")]
                times = [r[f"times_{peer}"] for r in best if r.get(f"times_{peer}")]
                if times:
                    told.append(f"{digits(min(times))} to {digits(max(times))} ({LABELS[name]})")
            if told:
                parts.append(f"`{op}` {_PEERS[peer]} {', '.join(told)}")
    first = records[0]
    sizes = ", ".join(f"{name} = {first[name]}" for name in "HKV")
    return (
        f"From {_LONG:,} tokens on, {first['dtype']}, {sizes}, times as long as ours: "
        f"{'; '.join(parts)} (`{result['command']}`, {result['device']}, {result['date'][:10]})."
    )


def _fused(records: list[Record]) -> bool:
    return any(r["impl"] == "triton" for r in records)


def kernel_block(path: Path) -> str:
    """The time of every kernel of the layouts that are chosen."""
    result = read_json(path)
    head = f"**{result['device']}**, {_origin(result)}."
    lines = ["| operation | B × T | decay | pass | ms | kernels |", "|---|---|---|---|---:|---|"]
    for record in result["records"]:
        if record["change"] or "failed" in record:
            continue
        place = f"{record['B']} × {record['T']:,} | {'yes' if record['decay'] else 'no'}"
        for name in ("forward", "backward"):
            parts = ", ".join(f"{k} {digits(v)}" for k, v in record[f"{name}_kernels"].items())
            ms = digits(record[f"{name}_ms"])
            lines.append(f"| `{record['op']}` | {place} | {name} | {ms} | {parts} |")
    return "\n".join([head, "", *lines])


def _load(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict) or any(key not in content for key in _NEEDED):
        raise ValueError(f"{path} is not a result file: it must hold {', '.join(_NEEDED)}")
    return content


def _part(result: dict[str, Any]) -> str:
    head = f"**{result['device']}**, {_origin(result)}."
    records = result["records"]
    busy = result.get("other_cores") or 0.0
    if busy > TOLERATED_CORES and not any(r["device"] == "cuda" for r in records):
        return f"{head} The times are not shown: other programs kept {busy} cores busy."
    tables = []
    for op in OPS:
        mine = [r for r in records if r["op"] == op]
        if mine:
            tables.append(_table(op, mine))
    return "\n\n".join([head, *tables, *_marked(result)])


def _marked(result: dict[str, Any]) -> list[str]:
    """A sentence about the peers whose errors are above the limit."""
    names = {
        f"{_PEERS[r['impl']]} ({r['op']}, gradient error {digits(r['gradient_error'])})"
        for r in result["parity"]
        if not r["within"]
    }
    return [f"Above the limit for errors: {', '.join(sorted(names))}."] if names else []


def _origin(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    commit = f" at {result['commit'][:7]}" if result["commit"] else ""
    copied = result.get("copy_gb_per_s")
    bandwidth = f"; a copy moves {copied:g} GB/s" if copied else ""
    return f"`{result['command']}`, {result['date'][:10]}{commit}; {versions}{bandwidth}"


def _table(op: str, records: list[Record]) -> str:
    shown = [name for name in entries(records) if name[0] in OURS or not name[1]]
    heads = [f"`{i}`" + (", decay" if d else "") if i in OURS else _PEERS[i] for i, d in shown]
    sizes = ", ".join(f"{name} = {records[0][name]}" for name in "HKV")
    peers = [peer for peer in PEERS if (peer, False) in shown]
    titles = ["pass", "B", "T", *heads, *(f"{peer} / ours" for peer in peers), "GiB"]
    lines = [
        f"`{op}`, {sizes}, {records[0]['dtype']}; ms, and the most memory that ours holds:",
        "",
        "| " + " | ".join(titles) + " |",
        "|---|" + "---:|" * (len(titles) - 1),
    ]
    places = list(dict.fromkeys((r["B"], r["T"]) for r in records))
    for name in PASSES:
        for B, T in places:
            found = [r for r in records if (r["pass"], r["B"], r["T"]) == (name, B, T)]
            row = {(r["impl"], r["decay"]): r for r in found}
            ours = our_row(row)
            cells = [digits(row.get(entry, {}).get("ms")) for entry in shown]
            cells += [digits(ours.get(f"times_{peer}")) for peer in peers]
            cells.append(digits(ours.get("peak_gib")))
            lines.append(f"| {LABELS[name]} | {B} | {T:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        print(f"wrote {write_page(Path())}")
    except ValueError as error:
        sys.exit(f"rankone: error: {error}")
