"""A folder of results belongs to one configuration, which its config.json holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rankone import provenance
from rankone.storage import read_json, write_json


def prepare_folder(out: Path, config: dict[str, Any], *, resume: bool, device: str = "cpu") -> None:
    """Makes a folder this configuration's, or says in one line why it cannot be."""
    file = out / "config.json"
    if file.exists():
        found = read_json(file)
        found = found.get("configuration") if isinstance(found, dict) else None
        if found != _plain(config):
            raise ValueError(
                f"{out} holds the results of another configuration ({_difference(found, config)}); "
                "choose another --out"
            )
        if not resume:
            raise ValueError(
                f"{out} holds results of this configuration already; "
                "add --resume to go on with them, or choose another --out"
            )
        if not os.access(out, os.W_OK):
            raise ValueError(f"{out} cannot be written to; choose another --out")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not a folder of results; choose another --out")
    else:
        write_json(file, {"configuration": config, **provenance.collect(device)})


def _plain(config: Any) -> Any:
    """The configuration as JSON gives it back."""
    if isinstance(config, dict):
        return {key: _plain(value) for key, value in config.items()}
    return [_plain(value) for value in config] if isinstance(config, (list, tuple)) else config


def _difference(found: Any, wanted: dict[str, Any]) -> str:
    """The first setting in which two configurations differ."""
    if not isinstance(found, dict):
        return "its config.json is not one of rankone's"
    for part, value in _plain(wanted).items():
        other = found.get(part)
        if isinstance(value, dict) and isinstance(other, dict):
            for key in value:
                if value[key] != other.get(key):
                    return f"{part} {key}: {other.get(key)} there, {value[key]} asked for"
        elif other != value:
            return f"{part}: {str(other)[:40]} there, {str(value)[:40]} asked for"
    return "it was made by another version"
