"""What was measured, as parts of pages.

`python -m rankone.report.measured` writes what stands between the marks of `BLOCKS` in
docs/mechanisms.md and docs/theory.md, from the files in benchmarks/results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rankone.bench.summary import digits
from rankone.report.pages import replace_block
from rankone.storage import read_json, write_text

Result = dict[str, Any]
NOTHING = "Nothing was measured yet."
_SHOWN = 3
"""Lengths of which times are shown, from the longest down by steps of 8."""


def scaling_block(result: Result) -> str:
    """Times at some lengths, exponents, and where softmax attention is overtaken."""
    records = result["records"]
    longest = max(r["T"] for r in records)
    shown = [longest // 8**n for n in reversed(range(_SHOWN)) if longest // 8**n >= 64]
    first = records[0]
    parts = [
        _origin(result),
        f"One sequence, D = {first['D']}, H = {first['H']}, {first['dtype']}.",
    ]
    for name, title in (("forward", "Forward"), ("training_step", "Training step")):
        heads = ["mechanism", *(f"T = {T:,}" for T in shown), "time ~ T^", "GiB", "memory ~ T^"]
        heads.append("overtakes softmax at")
        lines = [f"{title}, milliseconds:", "", *_head(heads)]
        for mechanism, causal in dict.fromkeys((r["mechanism"], r["causal"]) for r in records):
            own = {"mechanism": mechanism, "causal": causal, "pass": name}
            times = {r["T"]: r for r in _of(records, own)}
            fit, cross = (next(iter(_of(result[k], own)), {}) for k in ("exponents", "crossovers"))
            last = times[max(times)] if times else {}
            where = "–" if not cross else f"{cross['T']:,}" if cross["T"] else "not yet"
            lines.append(
                _row(
                    f"`{mechanism}`{', causal' if causal else ''}",
                    *(digits(times.get(T, {}).get("ms")) for T in shown),
                    _two(fit.get("ms_exponent")),
                    digits(last.get("peak_gib")),
                    _two(fit.get("peak_gib_exponent")),
                    where,
                )
            )
        parts.append("\n".join(lines))
    for r in result["left_out"]:
        which = f"`{r['mechanism']}`{', causal' if r['causal'] else ''}"
        parts.append(
            f"- {which}, {r['pass'].replace('_', ' ')}, from T = {r['from_T']:,}: {r['why']}."
        )
    return "\n\n".join(parts)


def approximation_block(result: Result) -> str:
    """Errors by number of features and the like, then bias and variance of random features."""
    records = result["records"]
    counts = sorted({r["count"] for r in records})
    parts = [_origin(result)]
    for data in dict.fromkeys(r["data"] for r in records):
        own = [r for r in records if r["data"] == data]
        lines = [f"Relative error, queries and keys {data}:", ""]
        lines += _head(["approximation", "number of", *(str(count) for count in counts)])
        for name in dict.fromkeys(r["mechanism"] for r in own):
            cells = {r["count"]: r for r in own if r["mechanism"] == name}
            errors = (digits(cells.get(count, {}).get("error")) for count in counts)
            lines.append(_row(name, next(iter(cells.values()))["of"], *errors))
        parts.append("\n".join(lines))
    lines = ["Estimates of e^(q·k / √K) by one random feature, over what they estimate:", ""]
    lines += _head(
        ["queries and keys", "features", "variance", "by the formula", "bias in standard errors"]
    )
    for r in result["features"]:
        numbers = (r["variance"], r["predicted"], r["bias_in_errors"])
        lines.append(_row(r["data"], r["features"], *map(digits, numbers)))
    return "\n\n".join([*parts, "\n".join(lines)])


def learning_block(result: Result) -> str:
    """Accuracies, a table for each task."""
    parts, records = [_origin(result)], result["records"]
    for task in dict.fromkeys(r["task"] for r in records):
        own = [r for r in records if r["task"] == task]
        first = own[0]
        size = "a smaller form of the task" if first["small"] else "the task in full"
        said = (
            f"`{task}`, {first['data']} ({size}): {first['steps']:,} steps of {first['batch']}, "
            f"rate {first['rate']:g}. The most frequent answer is right for "
            f"{_percent(first['majority'])} %, the most frequent one of those that begin with the "
            f"same token for {_percent(first['first_token'])} %."
        )
        lines = [said, "", *_head(["mechanism", "accuracy %", "±", "published %", "by", "seconds"])]
        for r in own:
            theirs = "–" if r["published"] is None else _percent(r["published"])
            cells = (_percent(r["accuracy"]), _percent(r["standard_error"]), theirs)
            lines.append(
                _row(f"`{r['mechanism']}`", *cells, r["published_by"] or "–", f"{r['seconds']:.0f}")
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def explain_block(result: Result) -> str:
    """The noise as if which models act behind their last layer, by the noise that there is."""
    records = [r for r in result["records"] if r["layer"] == r["layers"]]
    levels = sorted({r["sigma"] for r in records})
    lines = [_origin(result), "", *_head(["σ² of the prompts", *(digits(s**2) for s in levels)])]
    for model, layers in dict.fromkeys((r["model"], r["layers"]) for r in records):
        own = {r["sigma"]: r for r in records if (r["model"], r["layers"]) == (model, layers)}
        cells = (digits(own[s]["ridge_variance"]) for s in levels)
        lines.append(_row(f"{model.upper()}, {layers} layers", *cells))
    return "\n".join(lines)


class Block(NamedTuple):
    """A part of a page."""

    page: str
    mark: str
    write: Callable[[Result], str]
    results: tuple[str, ...]
    """Files in benchmarks/results, each with its picture if it has one."""


BLOCKS = (
    Block("docs/mechanisms.md", "scaling", scaling_block, ("scaling-gpu", "scaling-cpu")),
    Block("docs/mechanisms.md", "approximation", approximation_block, ("approximation",)),
    Block("docs/mechanisms.md", "long-range", learning_block, ("long-range",)),
    Block("docs/theory.md", "explain", explain_block, ("explain",)),
)


def write_pages(root: Path) -> list[Path]:
    """Writes all parts in the checkout at `root`; the pages' paths."""
    folder = root / "benchmarks/results"
    pages = {block.page: root / block.page for block in BLOCKS}
    if not folder.is_dir() or not all(page.is_file() for page in pages.values()):
        raise ValueError(f"{root.resolve()} is not a checkout of rankone: run this in its root")
    texts = {name: page.read_text(encoding="utf-8") for name, page in pages.items()}
    for block in BLOCKS:
        told = []
        for name in block.results:
            if (folder / f"{name}.json").is_file():
                told.append(block.write(read_json(folder / f"{name}.json")))
                if (folder / f"{name}.png").is_file():
                    told.append(f"![{block.mark}](../benchmarks/results/{name}.png)")
        block_text = "\n\n".join(told) or NOTHING
        texts[block.page] = replace_block(texts[block.page], block_text, block.mark)
    for name, text in texts.items():
        write_text(pages[name], text)
    return list(pages.values())


def _of(records: list[Result], wanted: Result) -> list[Result]:
    return [r for r in records if all(r[key] == value for key, value in wanted.items())]


def _origin(result: Result) -> str:
    commit = f" at {result['commit'][:7]}" if result["commit"] else ""
    busy = result.get("other_cores") or 0.0
    others = f"; other programs kept {busy} cores busy" if busy > 0.1 else ""
    return (
        f"**{result['device']}**, `{result['command']}`, {result['date'][:10]}{commit}, torch "
        f"{result['versions']['torch']}, {result['seconds']:.0f} s{others}."
    )


def _head(titles: list[str]) -> list[str]:
    return [_row(*titles), "|---" + "|---:" * (len(titles) - 1) + "|"]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    try:
        for written in write_pages(Path()):
            print(f"wrote {written}")
    except (ValueError, OSError) as error:
        sys.exit(f"rankone: error: {error}")
