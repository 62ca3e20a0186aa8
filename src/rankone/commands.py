"""The commands of the command line: frozen dataclasses whose fields are the options.

Nothing heavy is imported before a command runs, so that `rankone --help` answers at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

Target = Literal["table1", "fig1", "fig2", "fig3", "fig4", "fig5", "fig6", "fig7", "all", "ahn"]
Preset = Literal["smoke", "laptop", "paper"]
Device = Literal["auto", "cpu", "cuda"]
Op = Literal["all", "linear_attention", "delta_rule"]
Dtype = Literal["bfloat16", "float16", "float32"]

TaskName = Literal["listops", "text", "retrieval", "image", "pathfinder"]
Mechanism = Literal[
    "all", "softmax", "linear", "performer", "rfa", "linformer", "nystromformer", "longformer",
    "bigbird", "long_short",
]  # fmt: skip
TrainPreset = Literal["small", "laptop", "arena"]

_RUNS = "(default: runs/PRESET)"
_TRAINED = "(default: runs/TASK-PRESET)"


def _default(text: str) -> Any:
    """How a default is told that depends on where the command runs."""
    return arg(metavar="FILE", help_behavior_hint=f"(default: {text} in a checkout)")


def _default_folder(text: str) -> Any:
    """The same for a folder that depends on another option."""
    return arg(metavar="DIR", help_behavior_hint=f"(default: {text})")


@dataclass(frozen=True)
class Doctor:
    """Print versions, devices, threads, what is installed and what `auto` would choose."""

    def run(self) -> None:
        """Print the examination."""
        from rankone.doctor import doctor

        doctor()


@dataclass(frozen=True)
class Reproduce:
    """Make the tables and figures of two papers again.

    "Linear Transformers are Versatile In-Context Learners" (Vladymyrov et al. 2024), and with the
    target ahn "Transformers learn to implement preconditioned gradient descent for in-context
    learning" (Ahn et al. 2023).

    Trains the models, evaluates them, and writes tables, figures, a report, the trained models and
    the resolved configuration.
    """

    target: Positional[Target]
    """What to make of the first paper: the table, one figure, or all of them; or ahn."""

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
        name = "ahn" if self.target == "ahn" else self.preset
        out = self.out if self.out is not None else Path("runs") / name
        chosen: dict[str, Any] = {"preset": self.preset, "resume": self.resume, "seed": self.seed}
        if self.target == "ahn":
            from rankone.icl.ahn.reproduce import reproduce_ahn

            if self.device == "cuda":
                raise ValueError("ahn runs on the CPU: leave out --device")
            reproduce_ahn(out=out, **chosen)
        else:
            from rankone.icl.reproduce import reproduce

            reproduce(target=self.target, out=out, device=self.device, **chosen)


@dataclass(frozen=True)
class Explain:
    """Tell what every layer of trained models does: steps, preconditioning, memory, rescaling.

    Models of a run are given prompts of some noise levels. Behind each layer stand implicit
    weights; how they moved, and the noise for which ridge regression would have the same ones.
    """

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """A folder that `rankone icl reproduce` made; RUN/explain is written."""

    kind: Literal["all", "full", "diag", "gd++"] = "all"
    """Kind of the models."""

    layers: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: deepest)")] = (
        None
    )
    """Their depth."""

    noise: str = "sigma_5"
    """The noise that they were trained on, as the run names it."""

    sigma: tuple[float, ...] = (0.0, 1.0, 3.0, 5.0)
    """Standard deviations of the noise in the prompts."""

    seed: int = 0
    """Seed of the prompts."""

    def run(self) -> None:
        """Probe, print, write a file and a picture."""
        from rankone.icl.explain import explain

        options = dataclasses.asdict(self)
        explain(run=options.pop("folder"), **options)


@dataclass(frozen=True)
class Page:
    """Write a page on which the trained models of a folder are stepped through in a browser.

    It is one file and needs no network: kind, depth, noise and prompts are chosen on the page,
    where the models run on the exported weights.
    """

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder that `rankone icl reproduce` made."""

    out: Annotated[Path, arg(metavar="FILE", aliases=("-o",))] = Path("page.html")
    """File of the page."""

    def run(self) -> None:
        """Write it and print where it is."""
        from rankone.icl.page import write_page

        print(f"page: {write_page(run=self.folder, out=self.out)}")


@dataclass(frozen=True)
class Experiment:
    """Do an experiment that the paper left out; writes records and a figure.

    minima: the minima of GD++ with two layers. transfer: trained models on other numbers of
    examples, noises, covariances and tails. real_data: trained models on rows of data sets that
    come with scikit-learn.
    """

    name: Positional[Literal["minima", "transfer", "real_data"]]
    """Which one."""

    folder: Annotated[Path, arg(name="run", metavar="RUN")] = Path("runs/laptop")
    """Folder that `rankone icl reproduce` made; its models are used, and RUN/experiments is
    written."""

    out: Annotated[Path | None, _default_folder("RUN/experiments")] = None
    """Another folder for the results."""

    noise: str = "sigma_5"
    """What the models were trained on."""

    def run(self) -> None:
        """Compute, print, write."""
        from rankone.icl.experiments.run import experiment

        experiment(name=self.name, run=self.folder, out=self.out, noise=self.noise)


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


@dataclass(frozen=True)
class BenchOps:
    """Time linear attention and the delta rule beside their peers, in one run.

    Outputs and gradients are compared with float64 first. Peers are flash-linear-attention on a
    GPU, PyTorch's softmax attention, and transformers' delta rule on the CPU, each if installed.
    The file is written after every shape.
    """

    out: Annotated[
        Path | None,
        arg(
            metavar="FILE",
            help_behavior_hint="(default: benchmarks/results/ops-DEVICE.json in a checkout)",
        ),
    ] = None
    """JSON file for the measurements; the plot is beside it, with the ending png."""

    device: Device = "auto"
    """Where to compute; auto takes the GPU if there is one."""

    op: Op = "all"
    """One operation, or both."""

    quick: bool = False
    """Fewer repetitions and small sizes: a look, not a measurement."""

    minutes: Annotated[float | None, arg(metavar="NUMBER")] = None
    """Begin no further shape after this time; what is left out is told."""

    resume: bool = False
    """Keep what the file holds and measure the rest."""

    redraw: Annotated[Path | None, arg(metavar="FILE")] = None
    """Measure nothing: print and draw what this file holds."""

    def run(self) -> None:
        """Measure and print."""
        from rankone.bench.ops import bench

        bench(
            out=self.out,
            device=self.device,
            op=self.op,
            quick=self.quick,
            minutes=self.minutes,
            resume=self.resume,
            redraw=self.redraw,
        )


@dataclass(frozen=True)
class BenchKernels:
    """Print what the fused kernels of a call take of a GPU; none is needed.

    Every kernel of both passes is compiled and not run: registers of a thread, bytes that it
    spills, shared memory of a program.
    """

    op: Op = "all"
    """One operation, or both."""

    keys: int = 128
    """K, the size of a key."""

    values: int = 128
    """V, the size of a value."""

    heads: int = 16
    """H."""

    batch: int = 16
    """B."""

    length: int = 2048
    """T."""

    dtype: Dtype = "bfloat16"
    """Of the inputs."""

    capability: int = 90
    """The GPU: 80 is an A100, 89 an RTX 4090, 90 an H100 or H200."""

    def run(self) -> None:
        """Compile and print."""
        from rankone.bench.compiled import show

        show(**dataclasses.asdict(self))


@dataclass(frozen=True)
class Mechanisms:
    """Print what every mechanism of `rankone.layers` can do, what it costs and what it keeps."""

    dim: int = 512
    """D, the width of the layer whose state is counted."""

    heads: int = 8
    """H."""

    tokens: int = 4096
    """Tokens behind which the state is counted."""

    def run(self) -> None:
        """Print the table."""
        from rankone.report.mechanisms import show

        show(**dataclasses.asdict(self))


@dataclass(frozen=True)
class Train:
    """Train a classifier on a task of the long range arena, with one mechanism or with all alike.

    ListOps and Pathfinder are drawn as the arena draws them. For text, retrieval and image there
    are stand-ins, and a folder with CIFAR-10's binary version can be given. The folder of the
    results holds a model for each mechanism and one table.
    """

    task: Positional[TaskName]
    """What is learned."""

    mechanism: Mechanism = "all"
    """The token mixer, or all of them with the same budget."""

    preset: TrainPreset = "small"
    """How much work: a smaller task, the arena's task in an hour or two, or all of it on a GPU."""

    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint=_TRAINED)] = None
    """Folder of the results."""

    data: str | None = None
    """Source of the examples: text has reviews and sources, retrieval topics and halves."""

    folder: Annotated[Path | None, arg(metavar="DIR")] = None
    """For image: the folder that holds data_batch_1.bin and the others."""

    steps: int | None = None
    """Steps instead of the preset's; the rate rises and falls in proportion."""

    batch: int | None = None
    """Examples a step instead of the preset's."""

    rate: float | None = None
    """Largest learning rate instead of the preset's."""

    seed: int = 0
    """Seed of everything that is drawn."""

    device: Device = "auto"
    """Where to compute; auto takes the GPU if there is one."""

    resume: bool = False
    """Continue what the folder holds, or add mechanisms to it."""

    def run(self) -> None:
        """Train and print the table."""
        from rankone.training.long_range import train

        options = dataclasses.asdict(self)
        options["out"] = self.out or Path("runs") / f"{self.task}-{self.preset}"
        train(**options)


@dataclass(frozen=True)
class BenchScaling:
    """Time every mechanism of `rankone.layers` on longer and longer sequences, in one run.

    Forward pass and training step of a layer, and the memory of both; exponents of T, and where
    softmax attention is overtaken. The file is written after every length.
    """

    out: Annotated[Path | None, _default("benchmarks/results/scaling-DEVICE.json")] = None
    """JSON file for the measurements; the plot is beside it, with the ending png."""

    device: Device = "auto"
    """Where to compute; auto takes the GPU if there is one."""

    quick: bool = False
    """Short sequences and few repetitions: a look, not a measurement."""

    minutes: Annotated[float | None, arg(metavar="NUMBER")] = None
    """Begin no further length after this time."""

    resume: bool = False
    """Keep what the file holds and measure the rest."""

    redraw: Annotated[Path | None, arg(metavar="FILE")] = None
    """Measure nothing: print and draw what this file holds."""

    def run(self) -> None:
        """Measure and print."""
        from rankone.bench.scaling import bench

        bench(**dataclasses.asdict(self))


@dataclass(frozen=True)
class BenchApproximation:
    """Compare approximations with softmax attention as there is more of what they are made of.

    Features, landmarks, rank and tokens in view, on random queries and keys and on those of a model
    that is trained first; and bias and variance of random features.
    """

    out: Annotated[Path | None, _default("benchmarks/results/approximation.json")] = None
    """JSON file for the measurements; the plot is beside it, with the ending png."""

    quick: bool = False
    """Few draws: a look, not a measurement."""

    redraw: Annotated[Path | None, arg(metavar="FILE")] = None
    """Measure nothing: print and draw what this file holds."""

    def run(self) -> None:
        """Measure and print."""
        from rankone.bench.approximation import bench

        bench(**dataclasses.asdict(self))


@dataclass(frozen=True)
class Icl:
    """The laboratory: what linear transformers learn in context."""

    command: (
        Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
        | Annotated[Explain, tyro.conf.subcommand("explain")]
        | Annotated[Page, tyro.conf.subcommand("page")]
        | Annotated[Experiment, tyro.conf.subcommand("experiment")]
    )


@dataclass(frozen=True)
class Bench:
    """Measure speed on this machine."""

    command: (
        Annotated[BenchIcl, tyro.conf.subcommand("icl")]
        | Annotated[BenchOps, tyro.conf.subcommand("ops")]
        | Annotated[BenchKernels, tyro.conf.subcommand("kernels")]
        | Annotated[BenchScaling, tyro.conf.subcommand("scaling")]
        | Annotated[BenchApproximation, tyro.conf.subcommand("approximation")]
    )


Command = (
    Doctor | Mechanisms | Reproduce | Explain | Page | Experiment | Train
    | BenchIcl | BenchOps | BenchKernels | BenchScaling | BenchApproximation
)  # fmt: skip
Commands = (
    Annotated[Doctor, tyro.conf.subcommand("doctor")]
    | Annotated[Mechanisms, tyro.conf.subcommand("mechanisms")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Icl, tyro.conf.subcommand("icl")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
)
