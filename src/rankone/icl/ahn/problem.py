"""The data of Ahn, Cheng, Daneshmand, Sra 2023 (arXiv 2306.00297), sections 2 and 5.

A prompt has n examples x_i ~ N(0, Σ) and a query x ~ N(0, Σ), a vector w and labels y_i = <w, x_i>
without noise. Σ = Uᵀ D U with a rotation U. The loss is E[(prediction - <w, x>)²], without a half.

In white coordinates, x = Σ^½ g and v = Σ^½ w with the symmetric root, prompts are made of
g ~ N(0, I), and a prompt enters a model only through

    S = (1/n) sum_i g_i g_iᵀ     and     v,     where n S is a Wishart matrix.

The mean over the query is |v - v*|². A model without products of labels maps v linearly to its
error, so that the mean over w is exact too: S is all that is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from rankone.tasks.regression import Prompts, as_generator, bartlett

EIGENVALUES = (1.0, 1.0, 0.25, 0.0625, 1.0)
"""D of their experiments; their code holds its square root, (1, 1, 1/2, 1/4, 1)."""

Weights = Literal["inverse", "identity"]


class Sample(NamedTuple):
    """White Gram matrices of prompts, prompts last; sums over them are weighted."""

    grams: Float[Tensor, "d d R N"]
    importance: Float[Tensor, "R N"]


@dataclass(frozen=True)
class Problem:
    """Noise-free regression with features of covariance Uᵀ D U, where `seed` gives U.

    `weights` says how w is drawn: "inverse" is w ~ N(0, Σ⁻¹), as in Theorems 3 and 4 and in all
    experiments, "identity" is w ~ N(0, I), as in Theorem 1.

    >>> Problem(context=20, seed=0).covariance.diagonal().sum()
    tensor(3.3125, dtype=torch.float64)
    """

    context: int = 20
    seed: int = 0
    weights: Weights = "inverse"
    eigenvalues: tuple[float, ...] = EIGENVALUES

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ValueError(f"context must be at least 1, got {self.context}")
        if self.weights not in get_args(Weights):
            raise ValueError(
                f"weights must be one of {', '.join(get_args(Weights))}, got {self.weights!r}"
            )
        if not self.eigenvalues or min(self.eigenvalues) <= 0:
            raise ValueError(f"eigenvalues must be positive, got {self.eigenvalues}")

    @property
    def dim(self) -> int:
        """d, the number of features."""
        return len(self.eigenvalues)

    @property
    def rotation(self) -> Float[Tensor, "d d"]:
        """U, evenly distributed over the orthogonal matrices."""
        return _rotation(self.dim, self.seed)

    @property
    def covariance(self) -> Float[Tensor, "d d"]:
        """Σ = Uᵀ D U."""
        return self.power(1.0)

    def power(self, exponent: float) -> Float[Tensor, "d d"]:
        """Σ to a power, e.g. 0.5 for the symmetric root."""
        U = self.rotation
        return U.mT @ (torch.tensor(self.eigenvalues, dtype=U.dtype)[:, None] ** exponent * U)

    @property
    def start(self) -> Float[Tensor, "d d"]:
        """A root C of the covariance of v = Σ^½ w, so that E|R v|² = |R C|²: I or Σ^½."""
        return self.power(0.0 if self.weights == "inverse" else 0.5)

    def sample(self, batch: int, *, generator: Generator | int) -> Prompts:
        """Draws token prompts [B, n+1, d+1] in float64; the last token is the query, its y is 0."""
        g = as_generator(generator)
        root = self.power(0.5)
        x = torch.randn(batch, self.context + 1, self.dim, generator=g, dtype=root.dtype) @ root
        w = torch.randn(batch, self.dim, generator=g, dtype=root.dtype)
        w = w @ self.power(-0.5) if self.weights == "inverse" else w
        y = (x @ w[:, :, None]).squeeze(-1)
        target = y[:, -1].clone()
        y[:, -1] = 0
        return Prompts(torch.cat([x, y[:, :, None]], dim=2), target, w, torch.zeros_like(target))

    def sample_grams(
        self,
        batch: int,
        *,
        generator: Generator | int,
        dtype: torch.dtype = torch.float64,
        spikes: tuple[float, ...] = (),
        share: float = 0.6,
    ) -> Sample:
        """Draws white Gram matrices [d, d, 1, N]; costs the same for every n.

        With `spikes`, a share of the prompts has these variances, in turn, along a random direction
        of its own instead of 1, and all count p / q, the density of plain prompts over that of the
        mixture: means stay those of plain prompts, but prompts with an extreme eigenvalue, which
        decide about the loss of deep models, are seen often.
        """
        if batch < 1 or not 0 <= share < 1 or min((1.0, *spikes)) <= 0:
            raise ValueError(
                "batch must be at least 1, share from 0 to below 1 and spikes positive, "
                f"got {batch}, {share} and {spikes}"
            )
        g = as_generator(generator)
        features = bartlett(batch, self.dim, self.context, generator=g, dtype=dtype)
        count = round(share * batch) if spikes else 0
        u = torch.randn(count, self.dim, generator=g, dtype=dtype)
        u = u / u.norm(dim=1, keepdim=True)
        k = torch.tensor(spikes or (1.0,), dtype=dtype).repeat(batch)[:count]
        along = u[:, None] @ features[:count]
        features[:count] += (k.sqrt() - 1)[:, None, None] * u[:, :, None] * along
        wishart = features @ features.mT
        importance = _importance(wishart, u, k, self.context)
        grams = (wishart / self.context).permute(1, 2, 0)[:, :, None]
        return Sample(grams.contiguous(), importance[None])

    def spikes(self, degree: int) -> tuple[float, ...]:
        """Variances for means of the squares of polynomials of this degree in S.

        The largest is twice that of the eigenvalues where s^(2 degree) times their density is
        largest; the small ones are for the polynomial's value near 0, which is 1.
        """
        top = 8 * degree / (self.context + self.dim)
        return (0.25, 0.5, 1 + top / 4, 1 + top / 2, 1 + top)

    def token_grams(
        self, grams: Float[Tensor, "d d batch"], weights: Float[Tensor, "batch d"]
    ) -> Float[Tensor, "batch D D"]:
        """Gram matrices of the tokens (x, y), plain sums, of prompts with white S and weights w."""
        root = self.power(0.5).to(grams)
        half = torch.cat([root.expand(len(weights), -1, -1), (weights @ root)[:, None]], dim=1)
        return self.context * half @ grams.permute(2, 0, 1) @ half.mT


@cache
def _rotation(dim: int, seed: int) -> Float[Tensor, "d d"]:
    g = Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(dim, dim, generator=g, dtype=torch.float64))
    signs: Tensor = r.diagonal().sign()
    rotation: Tensor = q * signs
    return rotation


def _importance(
    wishart: Float[Tensor, "N d d"],
    directions: Float[Tensor, "M d"],
    spike: Float[Tensor, " M"],
    samples: int,
) -> Float[Tensor, " N"]:
    """p / q of prompts with W = sum g gᵀ, of which M have a variance k along a direction u.

    The density with that variance is k^(-n/2) exp((1 - 1/k) uᵀ W u / 2) times p, and q is the
    mixture of all (the balance heuristic of Veach and Guibas 1995).
    """
    count, plain = len(wishart), len(wishart) - len(spike)
    i, j = torch.triu_indices(*wishart.shape[1:])
    half = wishart[:, i, j]
    twice = torch.where(i == j, 1, 2) * ((1 - 1 / spike) / 2)[:, None]
    outer = twice * directions[:, i] * directions[:, j]
    constant = -samples / 2 * spike.log()
    mixture = [
        torch.addmm(constant, part, outer.mT).exp_().sum(1) for part in torch.split(half, 1000)
    ]
    return count / (torch.cat(mixture) + plain)


__all__ = ["EIGENVALUES", "Problem", "Sample", "Weights"]
