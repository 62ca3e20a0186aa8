"""The laboratory: linear transformers as in-context learners of noisy linear regression.

>>> from rankone.icl import LinearTransformer, NoisyRegression, Uniform
>>> task = NoisyRegression(dim=10, context=20, noise=Uniform(0, 5))
>>> model = LinearTransformer(kind="full", layers=3, dim=10)
>>> model(task.sample(4, generator=0).tokens).shape
torch.Size([4])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankone.icl.baselines import (
        adaptive_ridge,
        bayes_ridge,
        constant_ridge,
        ols,
        oracle_ridge,
        tune_constant,
        tune_ridge,
        tuned_ridge,
    )
    from rankone.icl.model import KINDS, LinearTransformer
    from rankone.tasks.noise import Categorical, Fixed, Noise, Uniform
    from rankone.tasks.regression import Grams, NoisyRegression, Prompts

# Public name -> the module it lives in. Resolved on first use, so that the command line can read
# the presets of this package without paying for torch.
_HOME = {
    "adaptive_ridge": "rankone.icl.baselines",
    "bayes_ridge": "rankone.icl.baselines",
    "constant_ridge": "rankone.icl.baselines",
    "ols": "rankone.icl.baselines",
    "oracle_ridge": "rankone.icl.baselines",
    "tune_constant": "rankone.icl.baselines",
    "tune_ridge": "rankone.icl.baselines",
    "tuned_ridge": "rankone.icl.baselines",
    "KINDS": "rankone.icl.model",
    "LinearTransformer": "rankone.icl.model",
    "Categorical": "rankone.tasks.noise",
    "Fixed": "rankone.tasks.noise",
    "Noise": "rankone.tasks.noise",
    "Uniform": "rankone.tasks.noise",
    "Grams": "rankone.tasks.regression",
    "NoisyRegression": "rankone.tasks.regression",
    "Prompts": "rankone.tasks.regression",
}

__all__ = [
    "KINDS",
    "Categorical",
    "Fixed",
    "Grams",
    "LinearTransformer",
    "Noise",
    "NoisyRegression",
    "Prompts",
    "Uniform",
    "adaptive_ridge",
    "bayes_ridge",
    "constant_ridge",
    "ols",
    "oracle_ridge",
    "tune_constant",
    "tune_ridge",
    "tuned_ridge",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
