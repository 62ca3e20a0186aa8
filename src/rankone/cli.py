"""The command line: parse, import lazily, call the library.

Each command is a frozen dataclass; its fields are the options and `run` does the work. Nothing
heavy is imported before a command runs, so `rankone --help` answers at once.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, OmitSubcommandPrefixes, Positional, arg

import rankone
from rankone.errors import BackendUnavailableError

__all__ = ["Bench", "BenchIcl", "Doctor", "Icl", "Reproduce", "main"]

Target = Literal["table1", "fig1", "fig2", "fig3", "fig4", "fig5", "fig6", "fig7", "all"]
Preset = Literal["smoke", "laptop", "paper"]
Device = Literal["auto", "cpu", "cuda"]

_DESCRIPTION = """Linear transformers: a library, a command line and a laboratory.

`rankone COMMAND --help` tells about a command, `rankone --version` the version."""
_EXAMPLES = (
    "rankone doctor",
    "rankone icl reproduce table1 --preset smoke --out runs/smoke",
    "rankone bench icl --quick",
)
_RUNS = "(default: runs/PRESET)"
_FAILED = 2
_INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C


@dataclass(frozen=True)
class Doctor:
    """Print versions, devices, threads, what is installed and what `auto` would choose."""

    def run(self) -> None:
        """Print the examination."""
        from rankone.doctor import doctor

        doctor()


@dataclass(frozen=True)
class Reproduce:
    """Make tables and figures of "Linear Transformers are Versatile In-Context Learners" again.

    Trains the models, evaluates them, and writes tables, figures, a report, the trained models and
    the resolved configuration.
    """

    target: Positional[Target]
    """What to make: the table, one figure, or all of them."""

    preset: Preset = "laptop"
    """How much work: smoke takes seconds, laptop minutes on two cores, paper wants a GPU."""

    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint=_RUNS)] = None
    """Folder of the results."""

    device: Device = "auto"
    """Where to compute; auto takes the GPU if there is one."""

    resume: bool = False
    """Continue the run that the folder holds."""

    seed: int = 0
    """Seed of everything that is drawn."""

    def run(self) -> None:
        """Reproduce the target."""
        from rankone.icl.reproduce import reproduce

        reproduce(
            target=self.target,
            preset=self.preset,
            out=self.out if self.out is not None else Path("runs") / self.preset,
            device=self.device,
            resume=self.resume,
            seed=self.seed,
        )


@dataclass(frozen=True)
class BenchIcl:
    """Time one training step of the laboratory beside the plain PyTorch step, in one run."""

    out: Annotated[
        Path | None,
        arg(
            metavar="FILE",
            help_behavior_hint="(default: benchmarks/results/icl-DEVICE.json in a checkout)",
        ),
    ] = None
    """JSON file for the measurements, which are printed in any case."""

    device: Device = "auto"
    """Where to compute; auto takes the GPU if there is one."""

    quick: bool = False
    """Fewer repetitions and smaller sizes: a look, not a measurement."""

    def run(self) -> None:
        """Measure and print."""
        from rankone.icl.bench import bench

        bench(out=self.out, device=self.device, quick=self.quick)


# The suppressed None keeps a group of one command a group.
@dataclass(frozen=True)
class Icl:
    """The laboratory: what linear transformers learn in context."""

    command: (
        Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
        | Annotated[None, tyro.conf.Suppress]
    )


@dataclass(frozen=True)
class Bench:
    """Measure speed on this machine."""

    command: Annotated[BenchIcl, tyro.conf.subcommand("icl")] | Annotated[None, tyro.conf.Suppress]


_Command = Doctor | Reproduce | BenchIcl
_Commands = (
    Annotated[Doctor, tyro.conf.subcommand("doctor")]
    | Annotated[Icl, tyro.conf.subcommand("icl")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
)


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


def _parse(arguments: list[str]) -> _Command | None:
    """Return the command that the arguments ask for, or None where they asked for help."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed: Any = tyro.cli(
                cast(Any, _Commands),
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
    return cast(_Command, getattr(parsed, "command", parsed))


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
