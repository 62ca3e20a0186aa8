"""A page on which trained models are stepped through, layer by layer, in a browser.

The page is one file: markup, style, script and numbers, and it asks no network for anything. Its
parts are in `rankone/report/page`; the script runs the exported models in float64. Numbers are
exported in base64, little-endian: weights and shared prompts rounded to float32, seven digits and
half as long as in decimals, the nodes of the Bayes predictor as float64.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankone.icl.chosen import chosen_models
from rankone.icl.ensemble import Run
from rankone.icl.model import LinearTransformer
from rankone.report.records import parse_noise
from rankone.storage import write_text
from rankone.tasks.noise import Fixed, noise_from_name
from rankone.tasks.regression import NoisyRegression

SCRIPTS = ("mathematics.js", "shapes.js", "charts.js", "page.js", "controls.js")
SHARED_PROMPTS = 4
LONGEST = 2
"""Examples that can be asked for, as a multiple of those in training."""


def write_page(run: Path, out: Path) -> Path:
    """Writes the page of the folder `run`, which `rankone icl reproduce` made; its path.

    For every kind, depth and noise it holds the best seed by evaluation.json, or the first one.

    Raises:
        ValueError: if there is no such folder, if no model is in it, or if one of its files is
            damaged. Nothing is written then.
    """
    if out.is_dir():
        raise ValueError(f"{out} is a folder; name a file, as in {out / 'page.html'}")
    write_text(out, assemble(page_data(run)))
    return out


def page_data(run: Path) -> dict[str, Any]:
    """All numbers of the page, ready for JSON."""
    found = chosen_models(run)
    config, dim, context = found.config, found.dim, found.context
    preset, models = config["configuration"]["preset"], found.models
    names = dict.fromkeys(each.noise for each in models)
    origin = {key: config.get(key) for key in ("command", "device", "date", "commit")}
    return {
        "dim": dim,
        "context": context,
        "origin": {**origin, "preset": preset.get("name")},
        "noises": {name: _noise(name) for name in names},
        "models": [
            _model(run, each, model) | {"loss": found.losses[each]}
            for each, model in models.items()
        ],
        "prompts": _shared_prompts(dim, context),
    }


def assemble(data: dict[str, Any]) -> str:
    """The page with everything in it. A browser runs its own script and style, and no other."""
    parts = resources.files("rankone.report") / "page"

    def read(name: str) -> str:
        return (parts / name).read_text(encoding="utf-8")

    style = "\n" + read("page.css")
    script = '\n"use strict";\n(() => {\n' + "\n".join(map(read, SCRIPTS)) + "})();\n"
    numbers = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    filled = {
        "policy": policy,
        "style": style,
        "data": numbers.replace("<", "\\u003c"),  # no text in it can end the element
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], read("page.html"))


def _digest(text: str) -> str:
    """How a content security policy names what it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _noise(name: str) -> dict[str, Any]:
    """What the page has to know of a distribution; `nodes` are those of `bayes_ridge`."""
    noise, told = noise_from_name(name), parse_noise(name)
    points, weights = noise.quadrature()
    return {
        "sentence": told.sentence,
        "values": None if told.uniform else list(told.values),
        "largest": noise.largest,
        "mean_square": noise.mean_square,
        "points": _base64([points], "<f8"),
        "weights": _base64([weights], "<f8"),
    }


def _model(folder: Path, run: Run, model: LinearTransformer) -> dict[str, Any]:
    p, q = model.p.detach(), model.q.detach()
    if model.heads != 1:
        raise ValueError(
            f"{folder / 'models' / run.name}.safetensors has {model.heads} heads, but the page "
            "shows models of one head; move it out of the folder"
        )
    if not (torch.isfinite(p).all() and torch.isfinite(q).all()):
        raise ValueError(
            f"{folder / 'models' / run.name}.safetensors holds numbers that are not finite; "
            "delete it and train it again with --resume"
        )
    return {**run._asdict(), "p": _base64([p], "<f4"), "q": _base64([q], "<f4")}


def _shared_prompts(dim: int, context: int) -> list[str]:
    """Prompts that are the same on every page: weights, features of examples and query, noise.

    The noise is that of σ = 1 and has an entry for the query too, which is not used.
    """
    task = NoisyRegression(dim=dim, context=LONGEST * context, noise=Fixed(1.0))
    drawn = task.sample(SHARED_PROMPTS, generator=0, dtype=torch.float64)
    x, y = drawn.tokens[..., :-1], drawn.tokens[..., -1]
    unit = y - (x @ drawn.weights[:, :, None]).squeeze(-1)
    return [_base64(parts, "<f4") for parts in zip(drawn.weights, x, unit, strict=True)]


def _base64(tensors: Iterable[Tensor], dtype: str) -> str:
    flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    return base64.b64encode(flat.numpy().astype(dtype).tobytes()).decode("ascii")
