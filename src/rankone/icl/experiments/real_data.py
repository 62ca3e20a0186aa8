"""Trained models on real data: prompts made of rows of data sets that come with scikit-learn.

A prompt is twenty rows and their labels, and the labels of forty other rows are predicted. Features
are brought to ten columns with mean 0 and covariance I (principal components of all rows; the
labels are not looked at), labels to mean 0 and to the variance that labels had in training. Nothing
is trained or tuned on the data; ridge regression chooses its penalty by leaving one row out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rankone.icl.baselines import adaptive_ridge, bayes_ridge, constant_ridge, ols
from rankone.icl.chosen import Chosen
from rankone.icl.experiments.transfer import deepest
from rankone.tasks.noise import noise_from_name

Record = dict[str, Any]
PROMPTS, QUERIES = 4000, 40
PENALTIES = tuple(10.0 ** (k / 4) for k in range(-8, 13))

SETS = {
    "diabetes": "progression of diabetes from ten measurements, 442 rows",
    "wine": "alcohol of a wine from its other twelve measurements, 178 rows",
    "breast cancer": "worst area of a nucleus from the ten mean measurements, 569 rows",
}


class Table(NamedTuple):
    """Rows of features of covariance I, and labels of variance 1."""

    x: Float[Tensor, "N d"]
    y: Float[Tensor, " N"]


def load(name: str, dim: int) -> Table:
    """One of `SETS` in `dim` columns; columns that are missing are zero."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ValueError(
            "the data sets come with scikit-learn: pip install scikit-learn"
        ) from error
    if name == "diabetes":
        x, y = datasets.load_diabetes(return_X_y=True, scaled=False)
    elif name == "wine":
        whole = datasets.load_wine().data
        x, y = whole[:, 1:], whole[:, 0]
    elif name == "breast cancer":
        whole = datasets.load_breast_cancer().data
        x, y = whole[:, :10], whole[:, 23]
    else:
        raise ValueError(f"data must be one of {', '.join(SETS)}, got {name!r}")
    x = (x - x.mean(0)) / x.std(0)
    u, s, _ = np.linalg.svd(x, full_matrices=False)
    kept = int(min(dim, (s > 1e-8 * s[0]).sum()))
    white = torch.zeros(len(x), dim, dtype=torch.float64)
    white[:, :kept] = torch.from_numpy(u[:, :kept].copy()) * len(x) ** 0.5
    return Table(white, torch.from_numpy((y - y.mean()) / y.std()))


def real_data(found: Chosen, *, noise: str = "sigma_5", context: int | None = None) -> list[Record]:
    """Mean squared errors of predicted labels over their variance, of models and of ridges."""
    trained, n = noise_from_name(noise), context or found.context
    models, d = deepest(found, noise), found.dim
    scale = (d + trained.mean_square) ** 0.5
    records: list[Record] = []
    for name in SETS:
        table = load(name, d)
        g = torch.Generator().manual_seed(0)
        rows = torch.stack(
            [torch.randperm(len(table.y), generator=g)[: n + QUERIES] for _ in range(PROMPTS)]
        )
        x, y = table.x[rows], scale * table.y[rows]
        seen, asked = (x[:, :n], y[:, :n]), (x[:, n:], y[:, n:])
        tokens = torch.cat([seen[0], seen[1][..., None]], dim=-1)
        gram = tokens.mT @ tokens
        predictors = {kind: model.implicit_weights(gram).detach() for kind, model in models.items()}
        predictors |= {
            "least squares": ols(gram),
            "constrr": constant_ridge(gram, trained.mean_square),
            "adarr": adaptive_ridge(gram, n),
            "bayes": bayes_ridge(gram, n, trained),
            "ridge, left out": left_out_ridge(*seen),
            "mean label": torch.zeros_like(gram[:, 0, :-1]),
        }
        for predictor, weights in predictors.items():
            off = (asked[0] @ weights[:, :, None])[..., 0] - asked[1]
            errors = off.square().mean(1) / scale**2
            records.append(
                {
                    "data": name,
                    "model": predictor,
                    "error": float(errors.mean()),
                    "standard_error": float(errors.std()) / PROMPTS**0.5,
                    "median": float(errors.median()),
                    "prompts": PROMPTS,
                    "context": n,
                }
            )
    return records


def left_out_ridge(x: Float[Tensor, "B n d"], y: Float[Tensor, "B n"]) -> Float[Tensor, "B d"]:
    """Ridge weights with the penalty of `PENALTIES` that predicts rows best that are left out.

    The error of a row that is left out is r_i / (1 - h_i), r the residuals and h the diagonal of
    X (XᵀX + p I)⁻¹ Xᵀ.
    """
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    inside = (u.mT @ y[..., None])[..., 0]
    best = torch.full_like(y[:, 0], torch.inf)
    weights = torch.zeros_like(x[:, 0])
    for penalty in PENALTIES:
        shrink = s**2 / (s**2 + penalty)
        residual = y - (u @ (shrink * inside)[..., None])[..., 0]
        hat = torch.einsum("bnk,bk->bn", u**2, shrink)
        error = (residual / (1 - hat).clamp_min(1e-9)).square().mean(1)
        found = (v.mT @ (s / (s**2 + penalty) * inside)[..., None])[..., 0]
        weights = torch.where((error < best)[:, None], found, weights)
        best = torch.minimum(best, error)
    return weights
