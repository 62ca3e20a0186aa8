"""Figures as files: the same picture gives the same bytes."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.figure import Figure

from rankone.storage import write_bytes

DPI = 150
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}


def render(figure: Figure, kind: Literal["png", "pdf"] = "png") -> bytes:
    """The figure as a PNG (150 dots an inch) or a PDF, without dates."""
    buffer = io.BytesIO()
    # Type 42 keeps text searchable and is what journals accept.
    with matplotlib.rc_context({"pdf.fonttype": 42}):
        figure.savefig(buffer, format=kind, dpi=DPI, metadata=_METADATA[kind])
    return buffer.getvalue()


def save(figure: Figure, out_dir: str | os.PathLike[str], name: str) -> bytes:
    """Writes `name`.png and `name`.pdf into `out_dir`, each whole or not at all; the PNG."""
    png = render(figure, "png")
    write_bytes(Path(out_dir) / f"{name}.png", png)
    write_bytes(Path(out_dir) / f"{name}.pdf", render(figure, "pdf"))
    return png
