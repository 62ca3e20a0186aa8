"""Feature maps: what queries and keys become before they meet in a state.

A map takes [..., K] to [..., F] and keeps the dtype. Maps that approximate softmax attention are
computed in float32 (float64 for float64). Random ones take their projection, so that whoever calls
decides when it is drawn; `orthogonal_projection` and `gaussian_projection` draw it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Generator, Tensor

FeatureMap = Callable[[Tensor], Tensor]


def identity(x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B K"]:
    """The key itself."""
    return x


def elu_plus_one(x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B K"]:
    """x + 1 above 0, e^x below: positive (Katharopoulos et al. 2020).

    Not elu(x) + 1, which is e^x - 1 + 1 and loses all digits of a small e^x.

    >>> elu_plus_one(torch.tensor([-8.0, 0.0, 2.0], dtype=torch.bfloat16))
    tensor([3.3569e-04, 1.0000e+00, 3.0000e+00], dtype=torch.bfloat16)
    """
    return torch.where(x > 0, x + 1, x.clamp_max(0).exp())


def relu(x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B K"]:
    """max(x, 0)."""
    return torch.relu(x)


def squared_relu(x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B K"]:
    """max(x, 0)²."""
    return torch.relu(x).square()


def softmax(x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B K"]:
    """Features that add to one."""
    return torch.softmax(x, dim=-1)


def dpfp(x: Float[Tensor, "*B K"], nu: int = 1) -> Float[Tensor, "*B F"]:
    """Deterministic parameter-free projection, F = 2 K nu (Schlag et al. 2021, equation 37).

    With r = [relu(x), relu(-x)] the features are r_i r_{i-s} for s = 1 … nu, indices modulo 2 K:
    products of neighbours, few of which are not 0.

    >>> dpfp(torch.tensor([2.0, -3.0]))
    tensor([6., 0., 0., 0.])
    """
    if not 1 <= nu < 2 * x.shape[-1]:
        raise ValueError(f"nu must be from 1 to 2 K - 1 = {2 * x.shape[-1] - 1}, got {nu}")
    both = torch.cat([torch.relu(x), torch.relu(-x)], dim=-1)
    return torch.cat([both * both.roll(s, dims=-1) for s in range(1, nu + 1)], dim=-1)


def taylor(x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B F"]:
    """[1, x, x ⊗ x / √2], F = 1 + K + K²: the inner product is 1 + q·k + (q·k)² / 2, the first
    terms of e^(q·k) and never below ½ (Zhang et al. 2024).
    """
    square = (x[..., :, None] * x[..., None, :]).flatten(-2) / 2**0.5
    return torch.cat([torch.ones_like(x[..., :1]), x, square], dim=-1)


def gaussian_projection(
    features: int, dim: int, *, generator: Generator, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "F K"]:
    """Independent rows w ~ N(0, I)."""
    _check_projection(features, dim)
    return torch.randn(features, dim, generator=generator, device=generator.device, dtype=dtype)


def orthogonal_projection(
    features: int, dim: int, *, generator: Generator, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "F K"]:
    """Rows w ~ N(0, I) that are orthogonal to each other, `dim` at a time.

    Their directions are those of a matrix drawn uniformly from the orthogonal group: Q of a QR
    decomposition is that only if the diagonal of R is made positive (Mezzadri 2007). Their lengths
    are those of independent normal vectors. Every row alone is normal, so what is unbiased with
    independent rows stays so, at a smaller variance (Choromanski et al. 2021, section 3.3).
    """
    _check_projection(features, dim)
    blocks = -(-features // dim)
    directions = gaussian_projection(blocks * dim, dim, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(directions.view(blocks, dim, dim))
    q = q * r.diagonal(dim1=1, dim2=2).sign()[:, None, :]
    lengths = gaussian_projection(features, dim, generator=generator, dtype=torch.float64).norm(
        dim=1
    )
    rows: Tensor = q.flatten(0, 1)[:features] * lengths[:, None]
    return rows.to(dtype)


def favor(
    x: Float[Tensor, "*B K"], projection: Float[Tensor, "*H F K"], *, query: bool
) -> Float[Tensor, "*B F"]:
    """Positive random features of softmax: E[φ(q)·φ(k)] = e^(q·k) (Choromanski et al. 2021).

    φ(x) = e^(W x - ‖x‖² / 2) / √F. For the kernel of attention scale q and k by K^-1/4. Of a query
    the largest exponent is subtracted, which a normaliser cancels. Nothing is subtracted of keys:
    a maximum over keys would look at the future. A projection [H, F, K] has rows of its own for
    every head of x [..., H, K].
    """
    wide, projected = _projected(x, projection)
    exponent = projected - wide.square().sum(-1, keepdim=True) / 2
    if query:
        exponent = exponent - exponent.amax(-1, keepdim=True).detach()
    features: Tensor = exponent.exp() / projection.shape[-2] ** 0.5
    return features.to(x.dtype)


def random_fourier(
    x: Float[Tensor, "*B K"], projection: Float[Tensor, "*H F K"]
) -> Float[Tensor, "*B F2"]:
    """[sin W x, cos W x] / √F: E[φ(q)·φ(k)] = e^(-‖q - k‖² / 2) (Rahimi and Recht 2007).

    For q and k of length 1 that is e^(q·k) up to a constant: random feature attention (Peng et al.
    2021). Features may be negative, and so may be a normaliser made of them.
    """
    _, angle = _projected(x, projection)
    features: Tensor = torch.cat([angle.sin(), angle.cos()], dim=-1) / projection.shape[-2] ** 0.5
    return features.to(x.dtype)


def _projected(x: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    """x and W x in at least float32."""
    heads = x.shape[-2:-1] if projection.dim() == 3 else ()
    if projection.shape[:-2] != heads or projection.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"projection must have shape [F, K] or [H, F, K] with K = {x.shape[-1]} and the heads "
            f"of x in its last axis but one, got {tuple(projection.shape)} for {tuple(x.shape)}"
        )
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide, w = x.to(dtype), projection.to(dtype)
    if projection.dim() == 3:
        return wide, torch.einsum("...hk,hfk->...hf", wide, w)
    return wide, wide @ w.mT


def _check_projection(features: int, dim: int) -> None:
    if features < 1 or dim < 1:
        raise ValueError(f"features and dim must be at least 1, got {features} and {dim}")


MAPS: dict[str, FeatureMap] = {
    "identity": identity,
    "elu_plus_one": elu_plus_one,
    "relu": relu,
    "squared_relu": squared_relu,
    "softmax": softmax,
    "dpfp": dpfp,
    "taylor": taylor,
}
"""Maps that need nothing but x, by name."""
