"""How near approximations come to softmax attention: `rankone bench approximation`.

Outputs of every approximation beside those of softmax attention, with the same queries, keys and
values, as features, landmarks, rank, windows or random blocks become more: on random queries and
keys, and on those of a model that was trained with softmax attention. Then the random features
themselves: how far the mean of e^(q·k)'s estimate is from it, and how it varies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from rankone import provenance
from rankone.layers.features import read, summed
from rankone.ops import feature_maps
from rankone.ops.low_rank import nystrom_attention, projected_attention
from rankone.ops.sparse_attention import attention, block_attention, window_attention
from rankone.progress import Narrator
from rankone.storage import read_json, write_json

Record = dict[str, Any]
Project = Callable[..., Tensor]


class Heads(NamedTuple):
    """Queries, keys and values of some sequences, [B, T, H, K] each."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def softmax(self) -> Tensor:
        """What is approximated."""
        return attention(*(x.transpose(1, 2) for x in self)).transpose(1, 2)


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    length: int = 1024
    counts: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    """Features, landmarks, rank, tokens of a window, and of random blocks."""
    draws: int = 8
    """Of everything that is random."""
    pairs: int = 200
    """Queries and keys whose kernel is estimated."""
    kernel_draws: int = 2000
    steps: int = 600
    """Of the training of the model whose queries and keys are taken."""


QUICK = Plan(length=256, counts=(16, 64, 256), draws=2, pairs=20, kernel_draws=200, steps=20)


def random_heads(plan: Plan) -> Heads:
    """Normal ones: the scores q·k / √K have variance 1."""
    g = torch.Generator().manual_seed(0)
    shape = 2, plan.length, 4, 64
    return Heads(*(torch.randn(shape, generator=g) for _ in range(3)))


def trained_heads(plan: Plan, narrator: Narrator) -> list[Heads]:
    """Those of both layers of an encoder that was trained on ListOps with softmax attention."""
    from rankone.models import Encoder, EncoderConfig
    from rankone.tasks.long_range.listops import Trees, listops

    trees = Trees(longer_than=plan.length // 2, shorter_than=plan.length)
    train = listops((2000, 1, 1), trees=trees, seed=0).train
    torch.manual_seed(0)
    config = EncoderConfig("softmax", vocabulary=16, classes=10, max_length=plan.length, dim=128)
    model = Encoder(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(0)
    with narrator.stage("training a model", plan.steps) as advance:
        for _, which in zip(range(plan.steps), train.orders(16, g), strict=False):
            batch = train.take(which)
            loss = torch.nn.functional.cross_entropy(model(batch.tokens), batch.labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            advance()
    return _heads_of(model, train.tokens)


@torch.no_grad()
def _heads_of(model: Any, tokens: Tensor) -> list[Heads]:
    """Of the two longest sequences, cut to the shorter one, so that there is no padding."""
    lengths = (tokens != 0).sum(1)
    longest = lengths.argsort(descending=True)[:2]
    given = tokens[longest, : int(lengths[longest].min())].long()
    found: list[Heads] = []
    hooks = [
        block.mixer.register_forward_hook(
            lambda layer, args, _: found.append(Heads(*layer.project(args[0])))
        )
        for block in model.blocks
    ]
    model.eval()(given)
    for hook in hooks:
        hook.remove()
    return found


def approximations(
    heads: Heads, count: int, g: Generator
) -> Iterator[tuple[str, str, Callable[[], Tensor]]]:
    """Name, what there are `count` of, and the outputs of one draw."""
    q, k, v = heads
    T, K = q.shape[1], q.shape[3]

    def performer(draw: Project) -> Tensor:
        w = draw(count, K, generator=g)
        of_q, of_k = (feature_maps.favor(x * K**-0.25, w, query=x is q) for x in (q, k))
        return _attend(of_q, of_k, v)

    def trigonometric() -> Tensor:
        w = feature_maps.gaussian_projection(max(1, count // 2), K, generator=g)
        of_q, of_k = (_trigonometric(x * K**-0.25, w) for x in (q, k))
        return _attend(of_q, of_k, v)

    def linformer() -> Tensor:
        e = torch.randn(1, count, T, generator=g) * count**-0.5
        return projected_attention(q, k, v, e, e)

    yield "performer", "features", lambda: performer(feature_maps.orthogonal_projection)
    yield "performer, independent", "features", lambda: performer(feature_maps.gaussian_projection)
    yield "sines and cosines", "features", trigonometric
    yield "linformer, not trained", "rank", linformer
    if count <= T:
        yield "nystromformer", "landmarks", lambda: nystrom_attention(q, k, v, landmarks=count)
    yield "longformer", "tokens in view", lambda: window_attention(q, k, v, window=count // 2)
    block = max(1, count // 8)
    yield (
        "bigbird",
        "tokens in view",
        lambda: block_attention(
            q, k, v, block=block, random=3, seed=int(torch.randint(10**6, (), generator=g))
        ),
    )


def _trigonometric(x: Tensor, w: Tensor) -> Tensor:
    """e^(‖x‖² / 2) [sin W x, cos W x] / √F: features of e^(q·k) that may be negative."""
    return feature_maps.random_fourier(x, w) * (x.square().sum(-1, keepdim=True) / 2).exp()


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    above, below = read(q, summed(k, v))
    return above / torch.where(below.abs() < 1e-6, torch.full_like(below, 1e-6), below)


def measure(data: str, heads: Heads, plan: Plan, advance: Callable[[], None]) -> list[Record]:
    """Relative errors of all approximations, means and deviations over draws."""
    want, records = heads.softmax, []
    for count in plan.counts:
        g = torch.Generator().manual_seed(count)
        for name, what, outputs in approximations(heads, count, g):
            errors = [
                float((outputs() - want).norm() / want.norm())
                for _ in range(plan.draws if _random(name) else 1)
            ]
            mean = sum(errors) / len(errors)
            spread = math.sqrt(sum((e - mean) ** 2 for e in errors) / max(1, len(errors) - 1))
            records.append(
                {
                    "data": data,
                    "mechanism": name,
                    "of": what,
                    "count": count,
                    "error": _round(mean),
                    "deviation": _round(spread),
                    "draws": len(errors),
                }
            )
        advance()
    return records


def _random(name: str) -> bool:
    return name not in ("nystromformer", "longformer")


def kernels(data: str, heads: Heads, plan: Plan) -> list[Record]:
    """Bias and variance of estimates of e^(q·k / √K) by one feature, over that kernel.

    With x = q K^-1/4 and y = k K^-1/4 the relative variance is e^(‖x + y‖²) - 1 for independent
    positive features and e^(‖x - y‖²) (1 - e^(-‖x - y‖²))² / 2 for sines and cosines (Choromanski
    et al. 2021, lemma 2). Where that is large no number of draws shows it: most of it is in a few
    of them, and the mean of the others is too small. The bias is told in standard errors.
    """
    g = torch.Generator().manual_seed(1)
    K = heads.q.shape[3]
    x, y = (_some(z.double(), plan.pairs, g) * K**-0.25 for z in (heads.q, heads.k))
    truth = (x * y).sum(-1).exp()
    near, far = ((x + sign * y).square().sum(-1) for sign in (1, -1))
    positive, others = near.exp() - 1, far.exp() * (1 - (-far).exp()).square() / 2
    found = []
    for name, draw, feature, predicted in (
        ("positive, orthogonal", feature_maps.orthogonal_projection, _positive, None),
        ("positive, independent", feature_maps.gaussian_projection, _positive, positive),
        ("sines and cosines", feature_maps.gaussian_projection, _trigonometric, others),
    ):
        estimates = []
        for _ in range(plan.kernel_draws):
            w = draw(K, K, generator=g, dtype=torch.float64)
            estimates.append((feature(x, w) * feature(y, w)).sum(-1) / truth)
        ratio = torch.stack(estimates)  # [draws, pairs]
        z = (ratio.mean(0) - 1) / (ratio.var(0) / len(estimates)).sqrt()
        found.append(
            {
                "data": data,
                "features": name,
                "variance": _round(float((ratio.var(0) * K).median())),
                "predicted": None if predicted is None else _round(float(predicted.median())),
                "bias_in_errors": _round(float(z.square().mean().sqrt())),
                "pairs": plan.pairs,
                "draws": plan.kernel_draws,
            }
        )
    return found


def _some(x: Tensor, count: int, g: Generator) -> Tensor:
    rows = x.flatten(0, 2)
    return rows[torch.randint(rows.shape[0], (count,), generator=g)]


def shortened(heads: Heads) -> Heads:
    """Queries and keys whose scores are inner products of vectors of length 1."""
    K = heads.q.shape[3]
    q, k = (torch.nn.functional.normalize(x, dim=-1) * K**0.25 for x in (heads.q, heads.k))
    return Heads(q, k, heads.v)


def _positive(x: Tensor, w: Tensor) -> Tensor:
    return feature_maps.favor(x, w, query=False)


def _round(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def bench(
    *, out: Path | None = None, quick: bool = False, redraw: Path | None = None,
    plan: Plan | None = None,
) -> Path:  # fmt: skip
    """Measures, prints tables, writes records and a plot; the path of the records.

    Args:
        out: benchmarks/results/approximation.json in a checkout and the working directory
            elsewhere; a quick look goes to runs/.
        redraw: measure nothing, print and draw what this file holds.
    """
    from rankone.bench.approximation_summary import publish

    if redraw is not None:
        found = read_json(redraw)
        if not isinstance(found, dict) or not (found.get("records") and found.get("features")):
            raise ValueError(f"{redraw} is no result of rankone bench approximation")
        return publish(redraw, found)
    plan = plan or (QUICK if quick else Plan())
    checkout = Path("benchmarks").is_dir() and Path("src/rankone").is_dir()
    folder = Path("runs") if quick else Path("benchmarks/results") if checkout else Path()
    path = out or folder / ("approximation-quick.json" if quick else "approximation.json")
    began = time.monotonic()
    with torch.no_grad(), Narrator() as narrator:
        with torch.enable_grad():
            layers = trained_heads(plan, narrator)
        sources = {"random": random_heads(plan)}
        sources |= {f"trained, layer {n + 1}": heads for n, heads in enumerate(layers)}
        records, features = [], []
        with narrator.stage("errors", len(sources) * len(plan.counts)) as advance:
            for data, heads in sources.items():
                records += measure(data, heads, plan, advance)
        sources["random, of length 1"] = shortened(sources["random"])
        for data, heads in sources.items():
            features += kernels(data, heads, plan)
    seconds = round(time.monotonic() - began, 1)
    content = {"seconds": seconds, "records": records, "features": features}
    write_json(path, provenance.collect("cpu") | content)
    return publish(path, read_json(path))
