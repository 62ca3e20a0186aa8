"""Time layouts of the fused operations, kernel by kernel, beside the one that is chosen.

    python benchmarks/op_variants.py OUT.json [SECONDS]

On a GPU. A layout's outputs and gradients are compared with those of the chosen one before it is
timed. The numbers in docs/kernels.md that are about single kernels are from here.
"""

import importlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from rankone import provenance
from rankone.bench.cases import Case, Shape
from rankone.storage import write_json

launches: Any = importlib.import_module("rankone.ops.launch")
linear = importlib.import_module("rankone.ops.linear_attention.triton")
delta = importlib.import_module("rankone.ops.delta_rule.triton")

SHAPES = [Shape(*rows, 16, 128, 128) for rows in ((16, 2048), (4, 8192), (1, 32768), (1, 131072))]
STARTED = time.monotonic()
Plan = Any
Grads = list[Tensor]
Passes = tuple[Callable[[], Any], Callable[[], Any], Grads]

# delta_rule with 32 columns, 4 warps and 1 stage reads where it must not: a fault of the compiler.
LINEAR: dict[int, list[dict[str, Any]]] = {
    2048: [{"stages": 3}, {"columns": 32, "stages": 3}, {"columns": 128, "warps": 8, "stages": 3}],
    8192: [
        {"stages": 2}, {"stages": 4}, {"length": 1024, "stages": 2}, {"length": 2048, "stages": 2},
        {"length": 4096, "stages": 2}, {"columns": 32},
    ],
    32768: [
        {"length": 1024}, {"length": 2048}, {"length": 2048, "stages": 3}, {"length": 8192},
        {"sum_columns": 128, "sum_warps": 8}, {"sum_columns": 128, "sum_warps": 4},
        {"length": 2048, "sum_columns": 128, "sum_warps": 8},
    ],
    131072: [
        {"length": 4096}, {"length": 8192}, {"length": 32768},
        {"sum_columns": 128, "sum_warps": 8}, {"length": 8192, "sum_columns": 128, "sum_warps": 8},
    ],
}  # fmt: skip
DELTA: dict[int, list[dict[str, Any]]] = {
    2048: [
        {"local_wide": 32}, {"local_registers": 168}, {"local": 64, "local_warps": 4},
        {"local": 64, "local_wide": 32, "local_warps": 4, "local_registers": 168},
        {"solve_registers": 128}, {"solve_registers": None}, {"solve_warps": 2},
        {"solve_warps": 8, "solve_registers": None}, {"wide_stages": 2}, {"wide": 32},
    ],
    8192: [{"stages": 2}, {"length": 4096, "stages": 2}, {"length": 2048, "stages": 2}],
    32768: [
        {"length": None, "columns": 16, "stages": 3}, {"length": 2048}, {"length": 8192},
        {"stages": 3}, {"transfer_registers": 168}, {"length": 2048, "transfer_registers": 168},
    ],
    131072: [
        {"length": None, "columns": 16, "stages": 3}, {"length": 8192}, {"length": 32768},
        {"transfer_registers": 168},
    ],
}  # fmt: skip


class Stopwatch:
    """Times every kernel that is launched while it runs."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] | None = None
        launch = launches._launch

        def timed(device: int, kernel: Any, *call: Any) -> None:
            if self.launched is None:
                launch(device, kernel, *call)
                return
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            launch(device, kernel, *call)
            after.record()
            self.launched.append((kernel.fn.__name__.removesuffix("_kernel"), before, after))

        launches._launch = timed

    def kernels(self, call: Callable[[], Any]) -> dict[str, float]:
        """Milliseconds of the kernels of a call in their order, medians of five."""
        found: dict[str, list[float]] = {}
        for _ in range(5):
            self.launched = []
            torch.cuda._sleep(2_000_000)  # so that launches do not wait for the host
            call()
            torch.cuda.synchronize()
            number: Counter[str] = Counter()
            for name, before, after in self.launched:
                number[name] += 1
                label = f"{name} {number[name]}"
                found.setdefault(label, []).append(before.elapsed_time(after))
            self.launched = None
        return {name: round(statistics.median(times), 4) for name, times in found.items()}

    def total(self, call: Callable[[], Any], repeats: int = 10) -> float:
        """Milliseconds of a call in a queue of calls, the median of five queues."""
        times = []
        for _ in range(5):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)
            before.record()
            for _ in range(repeats):
                call()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after) / repeats)
        return round(statistics.median(times), 4)


def linear_passes(x: dict[str, Tensor], decay: Tensor | None, plan: Plan) -> Passes:
    """Forward and backward, and what both made."""
    call = (x["q"], x["k"], x["v"], decay, None)

    def forward() -> Any:
        return linear.run(*call, None, 0.1, False, False, plan)

    output, _, states = forward()

    def backward() -> Any:
        return linear.run_backward(x["d_o"], None, *call, states, None, 0.1, plan)

    return forward, backward, [output, *(g for g in backward() if g is not None)]


def delta_passes(x: dict[str, Tensor], decay: Tensor | None, plan: Plan) -> Passes:
    """Forward and backward, and what both made."""
    call = (x["q"], x["k"], x["v"], x["beta"], decay, None)

    def forward() -> Any:
        return delta.run(*call, None, 0.1, False, False, plan)

    output, _, *kept = delta.run(*call, None, 0.1, False, True, plan)

    def backward() -> Any:
        return delta.run_backward(x["d_o"], None, *call, *kept, None, 0.1, plan)

    return forward, backward, [output, *(g for g in backward() if g is not None)]


def variants() -> Iterator[tuple[str, Shape, bool, dict[str, Any]]]:
    """The chosen layouts of everything first, then the others."""
    for shape in SHAPES:
        for op in ("linear_attention", "delta_rule"):
            for decay in (False, True):
                yield op, shape, decay, {}
    for shape in SHAPES:
        for op, table in (("linear_attention", LINEAR), ("delta_rule", DELTA)):
            for change in table[shape.T]:
                for decay in (False, True):
                    yield op, shape, decay, change


def main() -> None:
    """Everything, until the time is up."""
    out, seconds = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 120.0
    device, watch = torch.device("cuda"), Stopwatch()
    records: list[dict[str, Any]] = []
    result = provenance.collect("cuda") | {"seconds": 0.0, "records": records}
    for op, shape, decay, change in variants():
        if time.monotonic() - STARTED > seconds:
            break
        case = Case(op, shape, torch.bfloat16, device)
        x = case.inputs(decay=True)
        fades = x["decay"] if decay else None
        module, passes = (linear, linear_passes) if op[0] == "l" else (delta, delta_passes)
        plan = module.plan_of(x["q"], x["v"], shape.B)
        facts = case.facts(decay) | {"change": change}
        try:
            want = passes(x, fades, plan)[2]
            forward, backward, got = passes(x, fades, plan._replace(**change))
            pairs = list(zip(got, want, strict=True))
            off = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]
            record = facts | {
                "plan": plan._replace(**change)._asdict(),
                "difference": float(f"{max(off):.3g}"),
                "forward_ms": watch.total(forward),
                "backward_ms": watch.total(backward),
                "forward_kernels": watch.kernels(forward),
                "backward_kernels": watch.kernels(backward),
            }
        except Exception as error:  # a layout that does not compile or run is told
            record = facts | {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
        records.append(record)
        result["seconds"] = round(time.monotonic() - STARTED, 1)
        write_json(out, result)
        told = {k: record.get(k) for k in ("failed", "difference", "forward_ms", "backward_ms")}
        print(op, tuple(shape[:2]), "decay" if decay else "", change, told, flush=True)


if __name__ == "__main__":
    main()
