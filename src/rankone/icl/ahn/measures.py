"""What is measured on trained matrices: losses on fresh prompts, multiples and distances."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from rankone.icl.ahn.layers import Matrices, losses, whiten
from rankone.icl.ahn.problem import Problem, Sample


def fresh_prompts(
    problem: Problem, draws: int, prompts: int, *, seed: int, degree: int | None = None
) -> list[Sample]:
    """Draws of prompts that no model has seen; spiked ones for polynomials of a given degree."""
    if draws < 1 or prompts < 1:
        raise ValueError(f"draws and prompts must be at least 1, got {draws} and {prompts}")
    g = Generator().manual_seed(2**40 + seed)
    spikes = () if degree is None else problem.spikes(degree)
    return [problem.sample_grams(prompts, generator=g, spikes=spikes) for _ in range(draws)]


@torch.no_grad()
def draw_losses(
    matrices: Matrices, problem: Problem, draws: list[Sample]
) -> Float[Tensor, "draws R"]:
    """The mean loss on each draw.

    Rare prompts with a large eigenvalue decide about the mean of deep models. The median over
    draws of plain prompts is what one evaluation shows; their mean is mostly luck; the mean over
    draws of spiked prompts is the expectation.
    """
    means = [
        (losses(matrices, sample.grams, problem) * sample.importance).mean(1) for sample in draws
    ]
    return torch.stack(means)


def multiple(matrices: Float[Tensor, "*R d d"]) -> Float[Tensor, "*R"]:
    """The a for which a I is nearest: the mean of the diagonal."""
    return matrices.diagonal(dim1=-2, dim2=-1).mean(-1)


def distance(matrices: Float[Tensor, "*R d d"]) -> Float[Tensor, "*R"]:
    """Dist(M, I) = min_a |M - a I| / |M| in the Frobenius norm (section 5.1).

    >>> round(float(distance(torch.diag(torch.tensor([1.0, 3.0])))), 4)
    0.4472
    """
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype)
    rest = matrices - multiple(matrices)[..., None, None] * eye
    size: Tensor = matrices.norm(dim=(-2, -1)).clamp_min(1e-300)
    found: Tensor = rest.norm(dim=(-2, -1)) / size
    return found


def shown(matrices: Matrices, problem: Problem) -> Matrices:
    """What the paper shows: Σ^½ A Σ^½, and B as it is."""
    return Matrices(whiten(matrices, problem).A, matrices.B)


def layer_order(multiples: Float[Tensor, "R L"], like: tuple[float, ...]) -> Int[Tensor, "R L"]:
    """For each model the layers in the order of the given multiples.

    Where all B are 0 and all A are multiples of one matrix, layers can change places without a
    change of the model: which layer is which is chance.

    >>> layer_order(torch.tensor([[-1.7, -0.7, -0.4]]), (-0.69, -0.43, -1.72))
    tensor([[1, 2, 0]])
    """
    ranks = torch.tensor(like).argsort().argsort()
    return multiples.argsort(dim=1)[:, ranks]


__all__ = [
    "distance",
    "draw_losses",
    "fresh_prompts",
    "layer_order",
    "multiple",
    "shown",
]
