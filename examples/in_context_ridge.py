"""How near does a small linear transformer come to ridge regression that knows the noise?

Draws prompts, trains a diagonal model for some seconds, and prints the loss of its predictions,
after each layer, beside those of the closed forms:

    python examples/in_context_ridge.py
    python examples/in_context_ridge.py --steps 2000 --layers 4 --kind full
"""

from dataclasses import dataclass

import torch
import tyro
from rich.console import Console
from rich.table import Table

from rankone import icl
from rankone.icl.ensemble import Run
from rankone.icl.fitting import fit
from rankone.icl.training import Recipe


@dataclass(frozen=True)
class Config:
    kind: icl.model.Kind = "diag"
    layers: int = 3
    high: float = 5.0
    """Largest standard deviation of the noise."""
    steps: int = 400
    batch: int = 256
    heats: int = 2
    prompts: int = 20_000
    """Prompts of the evaluation."""


def main(config: Config) -> dict[str, float]:
    noise = icl.Uniform(0, config.high)
    run = Run(config.kind, config.layers, "noise", seed=0)
    recipe = Recipe(
        steps=config.steps, batch=config.batch, heats=config.heats, heat_steps=config.steps // 4
    )
    model = fit([run], {"noise": noise}, recipe).models[run]

    task = icl.NoisyRegression(dim=10, context=20, noise=noise)
    gram, truth, sigma = task.sample_gram(config.prompts, generator=1, dtype=torch.float64)
    with torch.no_grad():
        layers = model.implicit_weights(gram, every_layer=True).unbind(1)
    weights = {f"{config.kind} after layer {k}": w for k, w in enumerate(layers) if k > 0}
    weights |= {
        "least squares": icl.ols(gram),
        "ridge, one variance for all": icl.constant_ridge(gram, noise.mean_square),
        "ridge, estimated variance": icl.adaptive_ridge(gram, task.context),
        "Bayes, noise unknown": icl.bayes_ridge(gram, task.context, noise),
        "ridge that knows the noise": icl.oracle_ridge(gram, sigma),
    }
    # Over a standard normal query the loss ½ E(<w, x> - <truth, x>)² is ½ |w - truth|².
    loss = {name: float((w - truth).square().sum(1).mean() / 2) for name, w in weights.items()}

    table = Table("predictor", "loss", "above the oracle", title=f"noise U(0, {config.high:g})")
    oracle = loss["ridge that knows the noise"]
    for name, value in loss.items():
        table.add_row(name, f"{value:.4f}", f"{value - oracle:.4f}")
    Console().print(table)
    return loss


if __name__ == "__main__":
    main(tyro.cli(Config))
