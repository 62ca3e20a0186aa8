"""Check and time every variant of the fused GPU kernels.

    python benchmarks/fused_gpu_variants.py OUT.json

Each variant is first held to a float64 reference, then timed on 50 members × 2,048 sequences, the
size of the paper's training. A variant that does not compile or is wrong is reported as failed and
the others go on. The choice of defaults in `rankone.icl.gradients.fused_gpu` rests on this.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from rankone.icl.gradients import fused_gpu
from rankone.icl.gradients.fused_gpu import Variant, diag_loss_and_grad, full_loss_and_grad

DIM = 10
BUDGET = 150.0
"""Seconds after which no further variant is started."""
TOLERANCE = {"bf16x6": 1e-4, "tf32x3": 1e-4, "ieee": 1e-4, "bf16x3": 2e-3, "tf32": 5e-2}
STARTED = time.perf_counter()

Kernel = Callable[[Variant], tuple[Tensor, ...]]


def problem(members: int, streams: int, batch: int, layers: int) -> dict[str, Tensor]:
    """Regression prompts, and parameters that contract as trained ones do."""
    g = torch.Generator("cuda").manual_seed(layers)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda")

    context = 2 * DIM
    x, w = randn(streams, batch, context, DIM), randn(streams, batch, DIM) / (DIM + 1) ** 0.5
    noise = randn(streams, batch, context, 1) / (DIM + 1) ** 0.5
    tokens = torch.cat([x, x @ w[..., None] + noise], dim=-1)
    eye = torch.eye(DIM + 1, device="cuda")
    shape = (members, layers, 1, DIM + 1, DIM + 1)
    return {
        "P": 0.3 * eye + 0.03 * randn(*shape),
        "Q": -0.3 * eye + 0.03 * randn(*shape),
        "omega": -0.1 * (1 + 0.3 * randn(members, layers, 4)),
        "gram": tokens.mT @ tokens / context,
        "w": w,
        "stream": torch.arange(members, device="cuda") % streams,
    }


def kernel(kind: str, data: dict[str, Tensor]) -> Kernel:
    """The function under test with its data bound."""
    importance = torch.ones_like(data["w"][..., 0])
    rest = (data["gram"], data["w"], data["stream"], importance)
    if kind == "full":
        return lambda v: full_loss_and_grad(data["P"], data["Q"], *rest, variant=v)
    return lambda v: diag_loss_and_grad(data["omega"], *rest, variant=v)


def reference(kind: str, data: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Loss and gradients by autograd over the Gram recursion in float64."""
    names = ("P", "Q") if kind == "full" else ("omega",)
    leaves = [data[name].double().requires_grad_() for name in names]
    g, w = data["gram"].double()[data["stream"]], data["w"].double()[data["stream"]]
    eye = torch.eye(DIM + 1, dtype=g.dtype, device="cuda")
    y = (torch.arange(DIM + 1, device="cuda") == DIM).long()
    product = eye
    for l in range(leaves[0].shape[1]):
        if kind == "full":
            P, Q = leaves[0][:, l], leaves[1][:, l]
            b = (P[:, :, None] @ g[:, None] @ Q[:, :, None]).sum(1)
        else:
            b = leaves[0][:, l][..., 2 * y[:, None] + y][:, None] * g
        n = eye + b
        product = n @ product
        g = n @ g @ n.mT
    loss = 0.5 * (-product[..., -1, :-1] - w).square().sum(-1).mean(-1)
    return loss.detach(), *torch.autograd.grad(loss.sum(), leaves)


def largest_error(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """Largest error of any output, relative to the largest entry of a member's tensor."""
    errors = []
    for a, b in zip(got, want, strict=True):
        b = b.reshape(len(b), -1)
        error = (a.double().reshape(b.shape) - b).abs().amax(1)
        errors.append((error / b.abs().amax(1)).nan_to_num(nan=float("inf")).max().item())
    return max(errors)


def compiled(kind: str, layers: int, variant: Variant) -> dict[str, object]:
    """Registers, spills and shared memory of a kernel that has run."""
    function = fused_gpu._full_kernel if kind == "full" else fused_gpu._diag_kernel
    wanted = {"L": layers, "BB": variant.block, "PRECISION": variant.precision}
    for made in function.device_caches[torch.cuda.current_device()][0].values():
        names = made.src.fn.arg_names
        constants = {names[path[0]]: value for path, value in made.src.constants.items()}
        options = (made.metadata.num_warps, made.metadata.maxnreg)
        if wanted.items() <= constants.items() and options == (variant.warps, variant.registers):
            return {
                "registers": made.n_regs,
                "spills": made.n_spills,
                "shared": made.metadata.shared,
            }
    return {}


def compile_all(depths: tuple[int, ...]) -> dict[tuple[str, Variant, int], float | str]:
    """Launch every kernel once, in threads since compiling lets go of Python's lock.

    Seconds for each (with the others beside it), or why it failed.
    """
    jobs = [
        (k, v, n)
        for n in sorted(depths)[::-1]
        for k in ("full", "diag")
        for v in fused_gpu.variants()
    ]

    def job(what: tuple[str, Variant, int]) -> float | str:
        kind, variant, layers = what
        start = time.perf_counter()
        try:
            kernel(kind, problem(4, 2, 256, layers))(variant)
        except Exception as e:
            return f"{type(e).__name__}: " + (str(e).strip() or repr(e)).splitlines()[0][:200]
        return round(time.perf_counter() - start, 1)

    with ThreadPoolExecutor(max(1, min(12, (os.cpu_count() or 2) - 2))) as pool:
        return dict(zip(jobs, pool.map(job, jobs), strict=True))


def milliseconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Median of CUDA event times after warm-up."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def check(kind: str, variant: Variant, truths: dict[int, tuple[Tensor, ...]]) -> float:
    """Largest error at the depths of `truths`; raises if it is too large."""
    worst = 0.0
    for layers, want in truths.items():
        worst = max(worst, largest_error(kernel(kind, problem(4, 2, 256, layers))(variant), want))
    if worst > TOLERANCE[variant.precision]:
        raise ArithmeticError(f"wrong: relative error {worst:.1e}")
    return worst


def measure(kind: str, layers: int, variant: Variant) -> dict[str, object]:
    """Time at the size of the paper's training, and what the compiler made of it."""
    run = kernel(kind, problem(50, 10, 2048, layers))
    ms = milliseconds(lambda: run(variant))
    record: dict[str, object] = {"layers": layers, "ms": round(ms, 4)}
    with suppress(AttributeError, IndexError, KeyError):  # another Triton keeps them elsewhere
        record |= compiled(kind, layers, variant)
    return record


def main() -> None:
    """Run everything and write the records."""
    out = Path(sys.argv[1])
    records: list[dict[str, object]] = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    truths = {
        kind: {n: reference(kind, problem(4, 2, 256, n)) for n in (1, 3, 7)}
        for kind in ("full", "diag")
    }
    seconds = compile_all((1, 3, 7))
    torch.cuda.synchronize()
    print(f"compiled in {time.perf_counter() - STARTED:.0f} s", flush=True)
    for kind in ("full", "diag"):
        for variant in fused_gpu.variants():
            name = f"{kind:4} " + " ".join(f"{k}={x}" for k, x in variant._asdict().items())
            if time.perf_counter() - STARTED > BUDGET:
                print(f"{name}: not run, out of time", flush=True)
                continue
            spent = {n: seconds[kind, variant, n] for n in (1, 3, 7)}
            record: dict[str, object] = {"kind": kind, **variant._asdict(), "compile_s": spent}
            try:
                record["error"] = error = check(kind, variant, truths[kind])
                for layers in (3, 7):
                    m = measure(kind, layers, variant)
                    records.append(record | m)
                    print(f"{name}: error {error:.1e} compile {spent[layers]} s {m}", flush=True)
            except Exception as e:
                reason = (str(e).strip() or repr(e)).splitlines()[0][:200]
                print(f"{name}: FAILED {type(e).__name__}: {reason}", flush=True)
                records.append(record | {"failed": reason})
            out.write_text(json.dumps(records, indent=1))
    print(f"{time.perf_counter() - STARTED:.0f} s", flush=True)


if __name__ == "__main__":
    main()
