"""Files that are whole or not there: atomic writes, JSON and safetensors.

A write goes to a temporary file in the same folder, is flushed to the disk and then renamed over
the old file. Whoever reads sees the old content or the new one, never half of it, and a write that
fails leaves the old file as it was. Nothing here reads or writes pickle.
"""

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

__all__ = [
    "read_json",
    "read_tensors",
    "write_bytes",
    "write_json",
    "write_tensors",
    "write_text",
]


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace the file at `path` by `data` atomically, making its folder if need be."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        # Not tempfile: its files are private to the user, results should follow the umask.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace the file at `path` by `text` in UTF-8, atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | os.PathLike[str], obj: Any) -> None:
    """Replace the file at `path` by `obj` as JSON, atomically.

    Raises:
        ValueError: if `obj` holds what JSON cannot, NaN and infinity among it; a number that is
            not there is `None`. The file is untouched then.
    """
    try:
        text = json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be written as JSON: {error}") from error
    write_text(path, text + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return what the JSON file at `path` holds.

    Raises:
        ValueError: if the file is missing, unreadable, truncated or not JSON.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise _unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise _malformed(path, "JSON", f"byte {error.start} is not UTF-8") from error
    if not text.strip():
        raise _malformed(path, "JSON", "it is empty")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _malformed(path, "JSON", f"{error.msg} at {where}") from error
    except (ValueError, RecursionError) as error:
        raise _malformed(path, "JSON", str(error)) from error


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, "torch.Tensor"],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Replace the file at `path` by named tensors in the safetensors format, atomically.

    Tensors on any device are written from a copy in main memory; views and tensors that share
    memory are fine.
    """
    from safetensors.torch import save

    copies = {name: _copy(tensor) for name, tensor in tensors.items()}
    write_bytes(path, save(copies, dict(metadata) if metadata else None))


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, "torch.Tensor"], dict[str, str]]:
    """Return the tensors and the metadata of the safetensors file at `path`, on the CPU.

    Raises:
        ValueError: if the file is missing, unreadable, truncated or not safetensors.
    """
    from safetensors import SafetensorError, safe_open

    try:
        Path(path).open("rb").close()  # a missing file and a folder say so here, in plain words
        with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
            # Copies: the file may be replaced while its tensors are in use.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return tensors, dict(file.metadata() or {})
    except OSError as error:
        raise _unreadable(path, error) from error
    except SafetensorError as error:
        raise _malformed(path, "safetensors", str(error)) from error


def _copy(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the numbers of `tensor` in main memory, contiguous and shared with nothing."""
    return tensor.detach().cpu().contiguous().clone()


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut, where the system offers it."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _unreadable(path: str | os.PathLike[str], error: OSError) -> ValueError:
    if isinstance(error, FileNotFoundError):
        return ValueError(f"{path}: no such file; check the path, or make it again")
    return ValueError(f"{path}: cannot be read ({error.strerror or error}); check the path")


def _malformed(path: str | os.PathLike[str], kind: str, reason: str) -> ValueError:
    return ValueError(
        f"{path}: truncated or not {kind} ({' '.join(reason.split())}); "
        "delete it and make it again, or restore it from a copy"
    )
