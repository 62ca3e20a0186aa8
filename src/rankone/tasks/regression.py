"""Prompts of noisy linear regression, as tokens or as their Gram matrix.

One prompt: weights w ~ N(0, I), noise level sigma ~ p, examples x_i ~ N(0, C) and
y_i = <w, x_i> + sigma xi_i with xi_i ~ N(0, 1), for i = 1..n. The query's target is noise-free.

A linear transformer sees a prompt only through the Gram matrix of its context tokens
e_i = (x_i, y_i), the (d+1) x (d+1) matrix sum_i e_i e_iᵀ. That matrix is drawn here without
drawing tokens. With Z = [x_1 … x_n; xi_1 … xi_n] standard normal, Z Zᵀ is a Wishart matrix whose
triangular Bartlett factor A has chi-distributed diagonal and normal entries below it, so

    gram = (K A)(K A)ᵀ,   K = [[chol C, 0], [wᵀ chol C, sigma]],

at a cost that does not depend on n.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from rankone.tasks.noise import Noise, pick


class Prompts(NamedTuple):
    """A batch of token prompts; the last token is the query and its y is 0."""

    tokens: Float[Tensor, "B T D"]
    target: Float[Tensor, " B"]
    weights: Float[Tensor, "B d"]
    sigma: Float[Tensor, " B"]


class Grams(NamedTuple):
    """A batch of prompts reduced to their Gram matrices (plain sums, no 1/n)."""

    gram: Float[Tensor, "*S B D D"]
    weights: Float[Tensor, "*S B d"]
    sigma: Float[Tensor, "*S B"]


def as_generator(generator: Generator | int, device: str | torch.device = "cpu") -> Generator:
    """A generator as it is, or a new one on `device` from a seed."""
    if isinstance(generator, Generator):
        return generator
    return Generator(device=device).manual_seed(generator)


class NoisyRegression:
    """Noisy linear regression in context (Vladymyrov et al. 2024, section 2).

    `dim` features, `context` examples, `noise` a distribution of standard deviations,
    `covariance` of the features (identity if None).

    >>> from rankone.tasks.noise import Uniform
    >>> task = NoisyRegression(dim=10, context=20, noise=Uniform(0, 5))
    >>> task.sample(3, generator=0).tokens.shape
    torch.Size([3, 21, 11])
    >>> task.sample_gram(3, generator=0).gram.shape
    torch.Size([3, 11, 11])
    """

    def __init__(
        self,
        *,
        dim: int = 10,
        context: int = 20,
        noise: Noise,
        covariance: Float[Tensor, "d d"] | None = None,
    ) -> None:
        if not isinstance(dim, int) or dim < 1:
            raise ValueError(f"dim must be a whole number of at least 1, got {dim}")
        if not isinstance(context, int) or context < 1:
            raise ValueError(f"context must be a whole number of at least 1, got {context}")
        if not isinstance(noise, Noise):
            raise ValueError(f"noise must be Uniform, Categorical or Fixed, got {noise!r}")
        self.dim, self.context, self.noise = dim, context, noise
        self.covariance = covariance
        self._factor = None if covariance is None else _cholesky(covariance, dim)

    def sample(
        self, batch: int, *, generator: Generator | int, dtype: torch.dtype = torch.float32
    ) -> Prompts:
        """Draws token prompts on the generator's device."""
        _check_batch(batch, dtype)
        g = as_generator(generator)
        options: dict[str, Any] = {"generator": g, "device": g.device, "dtype": dtype}
        n, d = self.context, self.dim
        weights = torch.randn(batch, d, **options)
        sigma = self.noise.quantile(torch.rand(batch, **options))
        x = torch.randn(batch, n + 1, d, **options)
        if self._factor is not None:
            x = x @ self._factor.to(x).mT
        y = (x @ weights[:, :, None]).squeeze(-1)
        target = y[:, n].clone()
        y = y + sigma[:, None] * torch.randn(batch, n + 1, **options)
        y[:, n] = 0
        return Prompts(torch.cat([x, y[:, :, None]], dim=2), target, weights, sigma)

    def sample_gram(
        self, batch: int, *, generator: Generator | int, dtype: torch.dtype = torch.float32
    ) -> Grams:
        """Draws Gram matrices directly, at a cost that does not depend on `context`."""
        return Grams(*(t[0] for t in self.sample_grams(batch, [self.noise], generator, dtype)))

    def sample_grams(
        self,
        batch: int,
        noises: list[Noise],
        generator: Generator | int,
        dtype: torch.dtype = torch.float32,
    ) -> Grams:
        """The same prompts under several noise distributions: a leading axis S = len(noises).

        The features, weights, unit noise and the quantile of sigma are shared, so a stream of
        prompts does not depend on which other noise distributions are drawn beside it.
        """
        drawn, _ = self.sample_spiked(batch, noises, [as_generator(generator)], dtype)
        return Grams(*(tensor[0] for tensor in drawn))

    def sample_spiked(
        self,
        batch: int,
        noises: list[Noise],
        generators: list[Generator],
        dtype: torch.dtype = torch.float32,
        *,
        spikes: tuple[float, ...] = (),
        share: float = 0.0,
        units: tuple[float, Float[Tensor, " S"]] | None = None,
        impl: str = "reference",
    ) -> tuple[Grams, Float[Tensor, "G B"]]:
        """Prompts with long features among them, and importance weights: leading axes [G, S].

        Every generator gives a stream of its own. In the first `share` of a stream the features
        have a larger variance along one random direction, a prompt's own: `spikes` in turn. The
        weights p / q, with p the density of a prompt and q that of the mixture, make weighted
        means unbiased: a Gram matrix with one large eigenvalue, rare under p, is seen often and
        counts little. Gram matrices are in the given units of features and of labels.

        `impl` is "reference", or "fused_cpu" for many prompts on the CPU (the same numbers up to
        rounding; features without covariance only).
        """
        _check_batch(batch, dtype)
        count = round(share * batch) if spikes else 0
        if count >= batch or min((1.0, *spikes)) < 1 or share < 0:
            raise ValueError(
                f"spikes must be at least 1 and leave plain prompts, got {spikes} for {share} "
                f"of {batch} prompts"
            )
        fused = impl == "fused_cpu"
        if fused and self._factor is not None:
            raise ValueError("impl='fused_cpu' draws features without covariance only")
        if impl not in ("reference", "fused_cpu"):
            raise ValueError(f"impl must be 'reference' or 'fused_cpu', got {impl!r}")
        # Random numbers of one generator are drawn by one thread: on the CPU streams share cores.
        side_by_side = _pool().map if fused and len(generators) > 1 else map
        drawn = list(side_by_side(lambda g: self._draw(batch, count, g, dtype), generators))
        weights, u, factor, directions = (torch.stack(parts) for parts in zip(*drawn, strict=True))
        sigma = torch.stack([noise.quantile(u) for noise in noises], dim=1)
        directions = directions / directions.norm(dim=2, keepdim=True)
        in_turn = torch.arange(count, device=u.device) % max(1, len(spikes))
        spike = pick(spikes or (1.0,), in_turn, u.dtype)
        scale = units or (1.0, u.new_ones(len(noises)))
        if fused:
            from rankone.tasks.fused_grams import assemble
        else:
            assemble = self._assemble
        gram, half = assemble(factor, weights, sigma, directions, spike.sqrt() - 1, scale)
        importance = _importance(half, directions, spike, self.context)
        shared = weights[:, None].expand(*sigma.shape, self.dim).contiguous()
        return Grams(gram, shared, sigma), importance

    def _assemble(
        self,
        factor: Float[Tensor, "G B D m"],
        weights: Float[Tensor, "G B d"],
        sigma: Float[Tensor, "G S B"],
        directions: Float[Tensor, "G M d"],
        stretch: Float[Tensor, " M"],
        units: tuple[float, Float[Tensor, " S"]],
    ) -> tuple[Float[Tensor, "G S B D D"], Float[Tensor, "G B half"]]:
        """What `rankone.tasks.fused_grams.assemble` computes, and covariance too."""
        features, unit_noise = factor[..., :-1, :], factor[..., -1, :]
        count = len(stretch)
        if count:
            along = directions[:, :, None] @ features[:, :count]
            longer = features[:, :count] + stretch[:, None, None] * directions[..., None] * along
            features = torch.cat([longer, features[:, count:]], dim=1)
        i, j = torch.tril_indices(self.dim, self.dim, device=factor.device)
        half = (features @ features.mT)[..., i, j] if count else features[..., 0, :0]
        if self._factor is not None:
            features = self._factor.to(features) @ features
        clean = (weights[..., None, :] @ features).squeeze(-2)
        labels = clean[:, None] + sigma[..., None] * unit_noise[:, None]
        return _gram(features / units[0], labels / units[1][:, None, None]), half

    def _draw(
        self, batch: int, spiked: int, generator: Generator, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All random numbers of a stream: weights, noise quantiles, Bartlett factor, directions."""
        options: dict[str, Any] = {"generator": generator, "device": generator.device}
        weights = torch.randn(batch, self.dim, dtype=dtype, **options)
        u = torch.rand(batch, dtype=dtype, **options)
        factor = bartlett(batch, self.dim + 1, self.context, generator=generator, dtype=dtype)
        directions = torch.randn(spiked, self.dim, dtype=dtype, **options)
        return weights, u, factor, directions


def bartlett(
    batch: int,
    size: int,
    degrees: int,
    *,
    generator: Generator,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "B size m"]:
    """Factors A with A Aᵀ ~ Wishart(size, degrees), m = min(size, degrees) columns.

    Bartlett 1933: A is lower triangular (trapezoidal if degrees < size), A_ii² ~ chi² with
    degrees - i degrees of freedom (i from 0), standard normal below the diagonal.
    """
    columns = min(size, degrees)
    device = generator.device
    factor = torch.randn(batch, size, columns, generator=generator, device=device, dtype=dtype)
    half = torch.arange(degrees, degrees - columns, -1, device=device, dtype=dtype) / 2
    # The public gamma sampler takes no generator; this is the operator behind it.
    chi_square = 2 * torch._standard_gamma(half.expand(batch, columns), generator=generator)
    factor = factor.tril_()
    factor.diagonal(dim1=1, dim2=2).copy_(chi_square.sqrt())
    return factor


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that stay: to start one takes as long as to draw a thousand prompts."""
    return ThreadPoolExecutor(torch.get_num_threads())


def _gram(
    features: Float[Tensor, "G B d m"], labels: Float[Tensor, "G S B m"]
) -> Float[Tensor, "G S B D D"]:
    """Gram matrices of tokens (x, y): the block of the features is the same for all labels."""
    dim = features.shape[-2]
    gram = labels.new_empty(*labels.shape[:-1], dim + 1, dim + 1)
    mixed = (features @ labels.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    gram[..., :dim, :dim] = (features @ features.mT)[:, None]
    gram[..., :dim, dim] = mixed
    gram[..., dim, :dim] = mixed
    gram[..., dim, dim] = labels.square().sum(-1)
    return gram


def _importance(
    half: Float[Tensor, "G B half"],
    directions: Float[Tensor, "G M d"],
    spike: Float[Tensor, " M"],
    numbers: int,
) -> Float[Tensor, "G B"]:
    """The weights p / q of prompts of which the first M have variance k along a direction u.

    `numbers` examples with covariance 1 + (k - 1) u uᵀ have the density k^(-numbers / 2)
    exp((1 - 1/k) uᵀ S u / 2) times p, with S the Gram matrix of the features, of which `half`
    holds the lower triangle. q is the mixture over all prompts of the stream (the balance
    heuristic of Veach and Guibas 1995), so that a plain prompt that happens to be long is weighted
    like a spiked one.
    """
    streams, batch = half.shape[:2]
    spiked, dim = directions.shape[1:]
    if spiked == 0:
        return half.new_ones(streams, batch)
    # uᵀ S u for all prompts and directions is one product of half matrices, laid out as rows.
    i, j = torch.tril_indices(dim, dim, device=half.device)
    twice = torch.where(i == j, 1, 2) * ((1 - 1 / spike) / 2)[:, None]
    outer = twice * directions[..., i] * directions[..., j]
    constant = -numbers / 2 * spike.log().expand(streams, 1, spiked)
    log_ratio = torch.baddbmm(constant, half, outer.mT)
    mixture = log_ratio.exp_().sum(2) + (batch - spiked)  # infinite: a weight of 0, which is right
    return batch / mixture


def _check_batch(batch: int, dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")


def _cholesky(covariance: Tensor, dim: int) -> Tensor:
    if covariance.shape != (dim, dim):
        raise ValueError(
            f"covariance must have shape [d, d] = ({dim}, {dim}), got {tuple(covariance.shape)}"
        )
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(covariance.double())
    if info.item() != 0 or not torch.allclose(covariance, covariance.mT):
        raise ValueError("covariance must be symmetric and positive definite")
    return factor
