"""Gram matrices from the random numbers of many prompts on the CPU, a prompt a SIMD lane.

What `NoisyRegression` computes with PyTorch in a dozen passes over small matrices, in one: a block
of prompts is read into lanes, stretched along its directions, given its labels, and squared once a
noise distribution. A step of training draws thousands of prompts, and the passes would take longer
than the step.
"""

from __future__ import annotations

from functools import cache
from typing import Any, no_type_check

import numba
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rankone.lanes import lane_count, lane_dot


def assemble(
    factor: Float[Tensor, "G B D m"],
    weights: Float[Tensor, "G B d"],
    sigma: Float[Tensor, "G S B"],
    directions: Float[Tensor, "G M d"],
    stretch: Float[Tensor, " M"],
    units: tuple[float, Float[Tensor, " S"]],
) -> tuple[Float[Tensor, "G S B D D"], Float[Tensor, "G B half"]]:
    """The Gram matrices under every noise, and the lower half of those of the features alone.

    `factor` is lower trapezoidal: features, and unit noise in the last row. The features of the
    first M prompts are longer by the factor 1 + stretch along their unit direction. `units` of
    features and labels divide the Gram matrices; the halves, rows of the lower triangle one after
    another, are not divided.
    """
    streams, batch, D, m = factor.shape
    gram = np.empty((streams, sigma.shape[1], batch, D, D), dtype=_numpy(factor).dtype)
    half = np.empty((streams, batch, D * (D - 1) // 2), dtype=gram.dtype)
    arrays = map(_numpy, (factor, weights, sigma, directions, stretch, units[1].to(factor)))
    _kernel(D, m, lane_count())(*arrays, gram.dtype.type(1 / units[0]), gram, half)
    return torch.from_numpy(gram), torch.from_numpy(half)


def _numpy(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().numpy()


@cache
@no_type_check
def _kernel(D, m, W):
    d = D - 1
    square_of = lane_dot(D, m, D, W, transpose_b=True)

    @numba.njit(fastmath={"contract"}, nogil=True)
    def read(factor, first, count, tokens):
        for i in range(D):
            for j in range(min(i + 1, m)):
                for b in range(count):
                    tokens[i, j, b] = factor[first + b, i, j]

    @numba.njit(fastmath={"contract"}, nogil=True)
    def lengthen(tokens, directions, stretch, first, count):
        for b in range(min(count, len(stretch) - first)):
            u, k = directions[first + b], stretch[first + b]
            for j in range(m):
                along = tokens.dtype.type(0)
                for i in range(d):
                    along += u[i] * tokens[i, j, b]
                for i in range(d):
                    tokens[i, j, b] += k * along * u[i]

    @numba.njit(fastmath={"contract"}, nogil=True)
    def label(tokens, weights, first, count, clean):
        clean[:] = 0
        for i in range(d):
            for j in range(m):
                for b in range(count):
                    clean[j, b] += weights[first + b, i] * tokens[i, j, b]

    @numba.njit(fastmath={"contract"}, nogil=True)
    def write(square, first, count, out):
        for b in range(count):
            for i in range(D):
                for j in range(D):
                    out[first + b, i, j] = square[i, j, b]

    @numba.njit(fastmath={"contract"}, nogil=True)
    def write_half(square, scale, first, count, out):
        for b in range(count):
            place = 0
            for i in range(d):
                for j in range(i + 1):
                    out[first + b, place] = square[i, j, b] * scale
                    place += 1

    @numba.njit(fastmath={"contract"}, nogil=True)
    def kernel(factor, weights, sigma, directions, stretch, label_units, shrink, gram, half):
        streams, batch = factor.shape[:2]
        blocks = (batch + W - 1) // W
        for task in range(streams * blocks):
            stream, first = task // blocks, task % blocks * W
            count = min(W, batch - first)
            tokens = np.zeros((D, m, W), factor.dtype)
            square = np.empty((D, D, W), factor.dtype)
            clean = np.empty((m, W), factor.dtype)
            read(factor[stream], first, count, tokens)
            lengthen(tokens, directions[stream], stretch, first, count)
            label(tokens, weights[stream], first, count, clean)
            unit_noise = tokens[d].copy()
            tokens[:d] *= shrink
            for s in range(sigma.shape[1]):
                for j in range(m):
                    for b in range(count):
                        noise = sigma[stream, s, first + b] * unit_noise[j, b]
                        tokens[d, j, b] = (clean[j, b] + noise) / label_units[s]
                square_of(tokens, tokens, square)
                write(square, first, count, gram[stream, s])
            write_half(square, 1 / (shrink * shrink), first, count, half[stream])

    return kernel
