"""Softmax attention approximated from a few landmarks of queries and keys."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def pseudo_inverse(a: Float[Tensor, "*B M M"], iterations: int = 6) -> Float[Tensor, "*B M M"]:
    """The pseudo-inverse of matrices whose rows are distributions, by an iteration of third order.

        Z ← Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4,     Z_0 = Aᵀ / (‖A‖₁ ‖A‖_∞)

    The norms are each matrix's own, so that a matrix does not depend on others in its batch.

    Razavi et al. 2014; Xiong et al. 2021, section 3.2.
    """
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    columns, rows = a.abs().sum(-2).amax(-1), a.abs().sum(-1).amax(-1)
    z = a.mT / (columns * rows)[..., None, None]
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
    return z


def segment_means(
    x: Float[Tensor, "B T H K"], lengths: Int[Tensor, " B"], number: int
) -> tuple[Float[Tensor, "B M H K"], Bool[Tensor, "B M"]]:
    """Means of `number` segments of the first tokens of each sequence, and which are not empty.

    Segments are as equal as they can be: segment m of n tokens begins at ⌊m n / M⌋. With n <= M
    tokens, n segments hold one token each and the others none.

    >>> x = torch.arange(5.0).view(1, 5, 1, 1)
    >>> segment_means(x, torch.tensor([5]), 2)[0].flatten()
    tensor([0.5000, 3.0000])
    """
    T = x.shape[1]
    segment = torch.arange(number + 1, device=x.device)
    bounds = segment * lengths[:, None] // number  # [B, M + 1]
    count = bounds.diff(dim=1)
    place = torch.arange(-(-T // number), device=x.device)  # in a segment
    inside = place < count[..., None]  # [B, M, places]
    token = torch.where(inside, bounds[:, :-1, None] + place, 0).flatten(1)
    found = x.gather(1, token[..., None, None].expand(-1, -1, *x.shape[2:]))
    found = torch.unflatten(found, 1, inside.shape[1:])
    sums = (found * inside[..., None, None]).sum(
        2, dtype=torch.promote_types(x.dtype, torch.float32)
    )
    means = sums / count.clamp_min(1)[..., None, None]
    return means.to(x.dtype), count > 0


def nystrom_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    *,
    landmarks: int,
    iterations: int = 6,
    lengths: Int[Tensor, " B"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "B T H V"]:
    """softmax(Q K̃ᵀ) softmax(Q̃ K̃ᵀ)⁺ softmax(Q̃ Kᵀ) V, with Q̃ and K̃ means of segments.

    Args:
        landmarks: M, segments of a sequence.
        iterations: of the pseudo-inverse.
        lengths: tokens of each sequence, the rest is padding.
        scale: K^-0.5 by default.

    A sequence with no more tokens than landmarks is softmax attention. Time and memory O(T M).

    Xiong et al. 2021, equation 13.
    """
    if landmarks < 1 or iterations < 0:
        raise ValueError(
            f"landmarks must be at least 1 and iterations at least 0, got {landmarks}, {iterations}"
        )
    B, T, _, K = q.shape
    if lengths is None:
        lengths = torch.full((B,), T, device=q.device)
    number = min(landmarks, T)
    scale = K**-0.5 if scale is None else scale
    inside = torch.arange(T, device=q.device) < lengths[:, None]  # [B, T]
    q_few, there = segment_means(q, lengths, number)
    k_few, _ = segment_means(k, lengths, number)
    q, k, v, q_few, k_few = (x.transpose(1, 2) for x in (q, k, v, q_few, k_few))
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, q_few, k_few = (x.to(dtype) for x in (q * scale, k, q_few * scale, k_few))
    by_landmark = _softmax(q @ k_few.mT, there[:, None, None])
    single, _ = segment_means(v.transpose(1, 2), lengths, number)
    single = single.transpose(1, 2).to(dtype)
    if number == T:  # every token is its own landmark
        return (by_landmark @ single).to(v.dtype).transpose(1, 2)
    middle = _softmax(q_few @ k_few.mT, there[:, None, None])
    # Empty segments are apart from the others, so that they change no inverse.
    both = there[:, None, :, None] & there[:, None, None, :]
    eye = torch.eye(number, dtype=dtype, device=q.device)
    middle = torch.where(both, middle, eye)
    inverse = pseudo_inverse(middle, iterations)
    of_landmarks = torch.nn.functional.scaled_dot_product_attention(
        q_few, k, v.to(dtype), attn_mask=inside[:, None, None], scale=1.0
    ) * there[:, None, :, None]  # fmt: skip
    weights = inverse @ of_landmarks
    # Where every token is its own landmark, nothing has to be inverted.
    weights = torch.where((lengths <= number).view(-1, 1, 1, 1), single, weights)
    return (by_landmark @ weights).to(v.dtype).transpose(1, 2)


def _softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Over the keys that are there; there is one at least unless a sequence is empty."""
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return weights.nan_to_num(0.0)
