"""The command line: parse, import lazily, call the library. The commands are in `commands`."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from typing import Any, cast

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, OmitSubcommandPrefixes

import rankone
from rankone.commands import Command, Commands
from rankone.errors import BackendUnavailableError

__all__ = ["main"]

_DESCRIPTION = """Linear transformers: a library, a command line and a laboratory.

`rankone COMMAND --help` tells about a command, `rankone --version` the version."""
_EXAMPLES = (
    "rankone doctor",
    "rankone icl reproduce table1 --preset smoke --out runs/smoke",
    "rankone icl reproduce ahn --preset smoke --out runs/ahn",
    "rankone icl page runs/laptop -o page.html",
    "rankone icl explain runs/laptop --noise sigma_5 --sigma 0 1 3 5",
    "rankone icl experiment transfer --run runs/laptop",
    "rankone bench icl --quick",
    "rankone bench ops --quick",
    "rankone bench kernels --op delta_rule --keys 64 --values 64",
    "rankone bench scaling --quick",
    "rankone bench approximation --quick",
    "rankone mechanisms",
    "rankone train listops --mechanism linear --steps 200",
)
_FAILED = 2
_INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        argv: the arguments after the program's name; those of the process unless given.

    Returns:
        0 when all went well, 2 after one line on standard error that says what was wrong, 130
        after Ctrl-C. With `RANKONE_TRACEBACK=1` in the environment errors are raised instead.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if arguments in (["--version"], ["-V"]):
        print(f"rankone {rankone.__version__}")
        return 0
    command = None
    try:
        command = _parse(arguments)
        if command is not None:
            command.run()
    except _UsageError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # The reader has left (`rankone doctor | head -1`): that is not worth a message.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, BackendUnavailableError) as error:
        if os.environ.get("RANKONE_TRACEBACK") == "1":
            raise
        return _fail(str(error) or type(error).__name__)
    except KeyboardInterrupt:
        hint = "; the same command with --resume continues" if hasattr(command, "resume") else ""
        print(f"rankone: interrupted{hint}", file=sys.stderr)
        return _INTERRUPTED
    return 0


class _UsageError(Exception):
    """The arguments make no command."""


def _parse(arguments: list[str]) -> Command | None:
    """Return the command that the arguments ask for, or None where they asked for help."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed: Any = tyro.cli(
                cast(Any, Commands),
                prog="rankone",
                description=_DESCRIPTION,
                args=arguments,
                config=(OmitArgPrefixes, OmitSubcommandPrefixes, FlagCreatePairsOff),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            _print_examples(arguments)
            return None
        raise _UsageError(_condense(complaint.getvalue())) from None
    return cast(Command, getattr(parsed, "command", parsed))


def _print_examples(arguments: list[str]) -> None:
    """Print the examples of the command, or of all commands of the group, that was asked about."""
    words = [word for word in arguments if not word.startswith("-")]
    fitting = [text for text in _EXAMPLES if text.split()[1:3][: len(words)] == words[:2]]
    examples = fitting or _EXAMPLES
    print("\nexample:" if len(examples) == 1 else "\nexamples:")
    for text in examples:
        print(f"  {text}")


def _condense(box: str) -> str:
    """Make one line of the box that tyro draws around an error.

    >>> _condense('''
    ... ╭─ Invalid choice ───────────────────────╮
    ... │ invalid choice 'a' for argument '--b'. │
    ... │ Expected one of ('c', 'd').            │
    ... │ ────────────────────────────────────── │
    ... │ For full helptext, run rankone --help  │
    ... ╰────────────────────────────────────────╯''')
    "invalid choice 'a' for argument '--b'. Expected one of ('c', 'd')"
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    rows = [line.strip()[2:-1].rstrip() for line in plain.splitlines() if line.startswith("│")]
    parts: list[list[str]] = [[]]
    for row in rows:
        if set(row) == {"─"}:
            parts.append([])
        elif not row.startswith(" " * 8):  # the help of an option that is named in the row above
            parts[-1].append(row)
    texts = [" ".join(" ".join(part).split()) for part in parts]
    kept = [text for text in texts if text and not text.startswith(("For full", "Argument help"))]
    line = "; ".join(text.rstrip(".") for text in kept) or " ".join(plain.split())
    return line.replace("'command.", "'")


def _fail(message: str) -> int:
    print(f"rankone: error: {' '.join(message.split())}", file=sys.stderr)
    return _FAILED


if __name__ == "__main__":
    sys.exit(main())
