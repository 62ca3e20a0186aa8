"""Loss, gradient and read-out of every layer on the CPU: prompts in SIMD lanes, layers in cache.

A task is one member of the ensemble and one chunk of its batch; it walks through the chunk in
blocks of W prompts (W lanes). Per block and layer the forward pass is

    A = P G,   N = I + A Q,   M = N G,   G ← M Nᵀ (symmetric)

and with row vectors r (r_L = the last unit vector, r_l = r_{l+1} N_l, w_hat = -r_0[:d]) only the
last row of the last layer is needed. Backward, with g_0 = ∂loss/∂r_0, g_{l+1} = N_l g_l, and
Z = 2 ∂loss/∂G_{l+1} (0 for the last layer):

    Y = Z M + r_{l+1} g_lᵀ  (= ∂loss/∂N),   X = Y Qᵀ,   ∂P += X G,   ∂Q += Aᵀ Y,
    Z ← Nᵀ Z N + (Pᵀ X) + (Pᵀ X)ᵀ.

That is 10 products of D³ multiply-adds a layer and prompt (3.5 forward, 6.5 backward) and none
for the last layer; diagonal models need 4, since P G Q is there an elementwise product. The
partial sums of every chunk are written out and added in a fixed order, so results do not depend
on the number of threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any, no_type_check

import numba
import numpy as np
import torch
from jaxtyping import Float, Int
from numba import prange
from torch import Tensor

from rankone.icl.gradients.reference import EXPLODED
from rankone.lanes import lane_count, lane_dot

CHUNK_BLOCKS = 8
"""Blocks of lanes a task works through: enough to amortise its scratch memory."""


def _jit(**options: Any) -> Any:
    return numba.njit(fastmath={"contract"}, nogil=True, **options)


def full_loss_and_grad(
    P: Float[Tensor, "R L H D D"],
    Q: Float[Tensor, "R L H D D"],
    gram: Float[Tensor, "S B D D"],
    weights: Float[Tensor, "S B d"],
    stream: Int[Tensor, " R"],
    importance: Float[Tensor, "S B"],
    limit: Float[Tensor, " R"],
) -> tuple[Float[Tensor, " R"], Float[Tensor, "R L H D D"], Float[Tensor, "R L H D D"]]:
    """Loss and gradient of full models; see `loss_and_grad` for the arguments."""
    R, L, H, D, _ = P.shape
    lanes = lane_count()
    batch = gram.shape[1]
    chunks = -(-batch // (lanes * CHUNK_BLOCKS))
    loss = np.empty((R, chunks), dtype=np.float64)
    grad = np.empty((R, chunks, 2, L, H, D, D), dtype=_numpy(P).dtype)
    kernel = _full_kernel(D, lanes)
    kernel(*map(_numpy, (P, Q, gram, weights, stream, importance, limit)), loss, grad)
    total = torch.from_numpy(grad.sum(axis=1))
    return torch.from_numpy(loss.sum(axis=1) / batch).to(P.dtype), total[:, 0], total[:, 1]


def diag_loss_and_grad(
    omega: Float[Tensor, "R L four"],
    gram: Float[Tensor, "S B D D"],
    weights: Float[Tensor, "S B d"],
    stream: Int[Tensor, " R"],
    importance: Float[Tensor, "S B"],
    limit: Float[Tensor, " R"],
) -> tuple[Float[Tensor, " R"], Float[Tensor, "R L four"]]:
    """Loss and gradient of diagonal models with B = [[xx S, xy a], [yx aᵀ, yy c]] in each layer."""
    R, L, _ = omega.shape
    lanes = lane_count()
    batch = gram.shape[1]
    chunks = -(-batch // (lanes * CHUNK_BLOCKS))
    loss = np.empty((R, chunks), dtype=np.float64)
    grad = np.empty((R, chunks, L, 4), dtype=_numpy(omega).dtype)
    kernel = _diag_kernel(gram.shape[-1], lanes)
    kernel(*map(_numpy, (omega, gram, weights, stream, importance, limit)), loss, grad)
    total = torch.from_numpy(grad.sum(axis=1))
    return torch.from_numpy(loss.sum(axis=1) / batch).to(omega.dtype), total


def weights_after_layers(
    P: Float[Tensor, "R L H D D"],
    Q: Float[Tensor, "R L H D D"],
    gram: Float[Tensor, "S B D D"],
    stream: Int[Tensor, " R"],
) -> Float[Tensor, "R B L1 d"]:
    """Implicit weights of every model after 0, 1, …, L layers."""
    R, L, _, D, _ = P.shape
    out = np.empty((R, gram.shape[1], L + 1, D - 1), dtype=_numpy(P).dtype)
    _read_kernel(D, lane_count())(*map(_numpy, (P, Q, gram, stream)), out)
    return torch.from_numpy(out)


def _numpy(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().numpy()


@cache
@no_type_check
def _block_io(D, W):
    """Moves W prompts between rows of a batch and lanes; missing prompts are zeros."""

    @_jit()
    def load(gram, first, count, G):
        for i in range(D):
            for j in range(D):
                for b in range(W):
                    G[i, j, b] = gram[first + b, i, j] if b < count else 0

    @_jit()
    def sum_lanes(lanes, scale, out):
        for i in range(D):
            for j in range(D):
                total = 0.0
                for b in range(W):
                    total += lanes[i, j, b]
                out[i, j] = total * scale

    @_jit()
    def drop_exploded(r, weights, first, count, limit, G):
        """Empties the lanes of prompts that exploded; how many there were."""
        dropped = 0
        for b in range(count):
            square = 0.0
            for i in range(D - 1):
                square += (r[0, i, b] + weights[first + b, i]) ** 2
            if not square <= EXPLODED and limit < np.inf:
                G[:, :, b] = 0
                dropped += 1
        return dropped

    @_jit()
    def loss_of(r, weights, importance, first, count, limit, G, g):
        """Loss of a block from r_0, and its gradient in g."""
        total = 0.0
        for b in range(W):
            square = 0.0
            g[:, 0, b] = 0
            if b < count and (limit == np.inf or G[0, 0, b] != 0):
                for i in range(D - 1):
                    error = -r[0, i, b] - weights[first + b, i]
                    g[i, 0, b] = -error
                    square += error * error
            elif b < count:
                square = EXPLODED
            scale = importance[first + b] if b < count else 0.0
            if square < 1e-3 * limit:
                total += 0.5 * scale * square
            else:
                total += 0.5 * scale * limit * np.arcsinh(square / limit)
                scale /= np.sqrt(1 + (square / limit) ** 2)
            for i in range(D - 1):
                g[i, 0, b] *= scale
        return total

    return load, sum_lanes, drop_exploded, loss_of


@cache
@no_type_check
def _products(D, W):
    """The lane products that the kernels share."""
    return {
        "nn": lane_dot(D, D, D, W),
        "nt_symmetric": lane_dot(D, D, D, W, transpose_b=True, symmetric=True),
        "tn_symmetric_add": lane_dot(
            D, D, D, W, transpose_a=True, symmetric=True, start="twice_symmetric"
        ),
        "nn_add": lane_dot(D, D, D, W, start="out"),
        "tn_add": lane_dot(D, D, D, W, transpose_a=True, start="out"),
        "row": lane_dot(1, D, D, W),
        "column": lane_dot(D, D, 1, W),
        "outer": lane_dot(D, 1, D, W),
        "outer_add": lane_dot(D, 1, D, W, start="out"),
        "shared_left": lane_dot(D, D, D, W, shared_a=True),
        "shared_right_eye": lane_dot(D, D, D, W, shared_b=True, start="eye"),
        "shared_right_add": lane_dot(D, D, D, W, shared_b=True, start="out"),
        "shared_right_t": lane_dot(D, D, D, W, shared_b=True, transpose_b=True),
        "shared_left_t_add": lane_dot(D, D, D, W, shared_a=True, transpose_a=True, start="out"),
        "shared_row": lane_dot(1, D, D, W, shared_a=True),
        "row_shared_add": lane_dot(1, D, D, W, shared_b=True, start="out"),
        "row_add": lane_dot(1, D, D, W, start="out"),
        "shared_times_column": lane_dot(D, D, 1, W, shared_a=True),
        "outer_shared_add": lane_dot(D, 1, D, W, shared_a=True, start="out"),
    }


@cache
@no_type_check
def _full_kernel(D, W):
    load, sum_lanes, drop_exploded, loss_of = _block_io(D, W)
    op = _products(D, W)
    nn, nt_symmetric, tn_symmetric_add = op["nn"], op["nt_symmetric"], op["tn_symmetric_add"]
    nn_add, tn_add, row, column = op["nn_add"], op["tn_add"], op["row"], op["column"]
    outer, outer_add, shared_left = op["outer"], op["outer_add"], op["shared_left"]
    shared_right_eye, shared_right_add = op["shared_right_eye"], op["shared_right_add"]
    shared_right_t, shared_left_t_add = op["shared_right_t"], op["shared_left_t_add"]
    shared_row, row_shared_add, row_add = op["shared_row"], op["row_shared_add"], op["row_add"]
    shared_times_column, outer_shared_add = op["shared_times_column"], op["outer_shared_add"]

    @_jit()
    def forward(P, Q, G, A, N, M, a, r):
        """All layers of a block; the last layer leaves only its row r and a = P[d] G."""
        L, H = P.shape[0], P.shape[1]
        for layer in range(L - 1):
            for h in range(H):
                shared_left(P[layer, h], G[layer], A[layer, h])
                if h == 0:
                    shared_right_eye(A[layer, h], Q[layer, h], N[layer])
                else:
                    shared_right_add(A[layer, h], Q[layer, h], N[layer])
            nn(N[layer], G[layer], M[layer])
            nt_symmetric(M[layer], N[layer], G[layer + 1])
        r[L - 1] = 0
        r[L - 1, 0, D - 1] = 1
        for h in range(H):
            shared_row(P[L - 1, h, D - 1], G[L - 1], a[h])
            row_shared_add(a[h], Q[L - 1, h], r[L - 1])
        for layer in range(L - 2, -1, -1):
            row(r[layer + 1], N[layer], r[layer])

    @_jit()
    def backward(P, Q, G, A, N, M, a, r, g, v, X, Y, Z, dP, dQ):
        """Adds the gradient of a block to dP, dQ, lane by lane."""
        L, H = P.shape[0], P.shape[1]
        for layer in range(L - 1):
            column(N[layer], g[layer], g[layer + 1])
        Z[:] = 0
        for h in range(H):
            shared_times_column(Q[L - 1, h], g[L - 1], v)
            row_add(v, G[L - 1], dP[L - 1, h, D - 1])
            outer_add(a[h], g[L - 1], dQ[L - 1, h])
            outer_shared_add(P[L - 1, h, D - 1], v, Z)
        if L > 1:
            for i in range(D):
                for j in range(i + 1):
                    for b in range(W):
                        both = Z[i, j, b] + Z[j, i, b]
                        Z[i, j, b] = both
                        Z[j, i, b] = both
        for layer in range(L - 2, -1, -1):
            outer(r[layer + 1], g[layer], Y)
            nn_add(Z, M[layer], Y)
            if layer > 0:
                nn(Z, N[layer], M[layer])
                Z[:] = 0
            for h in range(H):
                shared_right_t(Y, Q[layer, h], X)
                nn_add(X, G[layer], dP[layer, h])
                tn_add(A[layer, h], Y, dQ[layer, h])
                if layer > 0:
                    shared_left_t_add(P[layer, h], X, Z)
            if layer > 0:
                tn_symmetric_add(N[layer], M[layer], Z)

    @_jit(parallel=True)
    def kernel(P, Q, gram, weights, stream, importance, limit, loss, grad):
        R, L, H = P.shape[0], P.shape[1], P.shape[2]
        batch, chunks = gram.shape[1], loss.shape[1]
        kind = P.dtype
        for task in prange(R * chunks):
            member, chunk = task // chunks, task % chunks
            s, bound = stream[member], limit[member]
            G = np.empty((L, D, D, W), kind)
            A = np.empty((L, H, D, D, W), kind)
            N = np.empty((L, D, D, W), kind)
            M = np.empty((L, D, D, W), kind)
            a = np.empty((H, 1, D, W), kind)
            r = np.empty((L, 1, D, W), kind)
            g = np.empty((L, D, 1, W), kind)
            v = np.empty((D, 1, W), kind)
            X = np.empty((D, D, W), kind)
            Y = np.empty((D, D, W), kind)
            Z = np.empty((D, D, W), kind)
            dP = np.zeros((L, H, D, D, W), kind)
            dQ = np.zeros((L, H, D, D, W), kind)
            total = 0.0
            for block in range(CHUNK_BLOCKS):
                first = (chunk * CHUNK_BLOCKS + block) * W
                count = min(W, batch - first)
                if count > 0:
                    load(gram[s], first, count, G[0])
                    forward(P[member], Q[member], G, A, N, M, a, r)
                    if drop_exploded(r[0], weights[s], first, count, bound, G[0]):
                        forward(P[member], Q[member], G, A, N, M, a, r)
                    total += loss_of(
                        r[0], weights[s], importance[s], first, count, bound, G[0], g[0]
                    )
                    backward(P[member], Q[member], G, A, N, M, a, r, g, v, X, Y, Z, dP, dQ)
            loss[member, chunk] = total
            for layer in range(L):
                for h in range(H):
                    sum_lanes(dP[layer, h], 1.0 / batch, grad[member, chunk, 0, layer, h])
                    sum_lanes(dQ[layer, h], 1.0 / batch, grad[member, chunk, 1, layer, h])

    return kernel


@cache
@no_type_check
def _diag_kernel(D, W):
    load, _, drop_exploded, loss_of = _block_io(D, W)
    op = _products(D, W)
    nn, nt_symmetric, tn_symmetric_add = op["nn"], op["nt_symmetric"], op["tn_symmetric_add"]
    nn_add, row, column, outer = op["nn_add"], op["row"], op["column"], op["outer"]

    @_jit()
    def add_scaled(omega, G, out):
        """out += Omega ∘ G."""
        for i in range(D):
            x, y = (omega[0], omega[1]) if i < D - 1 else (omega[2], omega[3])
            source, target = G[i].reshape(-1), out[i].reshape(-1)
            for t in range((D - 1) * W):
                target[t] += x * source[t]
            for t in range((D - 1) * W, D * W):
                target[t] += y * source[t]

    @_jit()
    def correlate(Y, G, out):
        """out += the sums of Y ∘ G over the four blocks, lane by lane."""
        for i in range(D):
            x, y = (0, 1) if i < D - 1 else (2, 3)
            for j in range(D - 1):
                for b in range(W):
                    out[x, b] += Y[i, j, b] * G[i, j, b]
            for b in range(W):
                out[y, b] += Y[i, D - 1, b] * G[i, D - 1, b]

    @_jit()
    def forward(omega, G, N, M, r):
        L = omega.shape[0]
        for layer in range(L - 1):
            N[layer] = 0
            for i in range(D):
                N[layer, i, i] = 1
            add_scaled(omega[layer], G[layer], N[layer])
            nn(N[layer], G[layer], M[layer])
            nt_symmetric(M[layer], N[layer], G[layer + 1])
        for j in range(D - 1):
            for b in range(W):
                r[L - 1, 0, j, b] = omega[L - 1, 2] * G[L - 1, D - 1, j, b]
        for b in range(W):
            r[L - 1, 0, D - 1, b] = 1 + omega[L - 1, 3] * G[L - 1, D - 1, D - 1, b]
        for layer in range(L - 2, -1, -1):
            row(r[layer + 1], N[layer], r[layer])

    @_jit()
    def backward(omega, G, N, M, r, g, Y, Z, grad):
        L = omega.shape[0]
        for layer in range(L - 1):
            column(N[layer], g[layer], g[layer + 1])
        Z[:] = 0
        for j in range(D):
            k = 2 if j < D - 1 else 3
            for b in range(W):
                grad[L - 1, k, b] += g[L - 1, j, 0, b] * G[L - 1, D - 1, j, b]
                Z[D - 1, j, b] += omega[L - 1, k] * g[L - 1, j, 0, b]
                Z[j, D - 1, b] += omega[L - 1, k] * g[L - 1, j, 0, b]
        for layer in range(L - 2, -1, -1):
            outer(r[layer + 1], g[layer], Y)
            nn_add(Z, M[layer], Y)
            correlate(Y, G[layer], grad[layer])
            if layer > 0:
                nn(Z, N[layer], M[layer])
                Z[:] = 0
                add_scaled(omega[layer], Y, Z)
                tn_symmetric_add(N[layer], M[layer], Z)

    @_jit(parallel=True)
    def kernel(omega, gram, weights, stream, importance, limit, loss, grad):
        R, L = omega.shape[0], omega.shape[1]
        batch, chunks = gram.shape[1], loss.shape[1]
        kind = omega.dtype
        for task in prange(R * chunks):
            member, chunk = task // chunks, task % chunks
            s, bound = stream[member], limit[member]
            G = np.empty((L, D, D, W), kind)
            N = np.empty((L, D, D, W), kind)
            M = np.empty((L, D, D, W), kind)
            r = np.empty((L, 1, D, W), kind)
            g = np.empty((L, D, 1, W), kind)
            Y = np.empty((D, D, W), kind)
            Z = np.empty((D, D, W), kind)
            lanes = np.zeros((L, 4, W), kind)
            total = 0.0
            for block in range(CHUNK_BLOCKS):
                first = (chunk * CHUNK_BLOCKS + block) * W
                count = min(W, batch - first)
                if count > 0:
                    load(gram[s], first, count, G[0])
                    forward(omega[member], G, N, M, r)
                    if drop_exploded(r[0], weights[s], first, count, bound, G[0]):
                        forward(omega[member], G, N, M, r)
                    total += loss_of(
                        r[0], weights[s], importance[s], first, count, bound, G[0], g[0]
                    )
                    backward(omega[member], G, N, M, r, g, Y, Z, lanes)
            loss[member, chunk] = total
            for layer in range(L):
                for k in range(4):
                    grad[member, chunk, layer, k] = lanes[layer, k].sum() / batch

    return kernel


@cache
@no_type_check
def _read_kernel(D, W):
    load, _, _, _ = _block_io(D, W)
    op = _products(D, W)
    nn, nt_symmetric, row = op["nn"], op["nt_symmetric"], op["row"]
    shared_left, shared_right_eye = op["shared_left"], op["shared_right_eye"]
    shared_right_add = op["shared_right_add"]

    @_jit(parallel=True)
    def kernel(P, Q, gram, stream, out):
        R, L, H = P.shape[0], P.shape[1], P.shape[2]
        batch = gram.shape[1]
        blocks = (batch + W - 1) // W
        kind = P.dtype
        for task in prange(R * blocks):
            member, first = task // blocks, (task % blocks) * W
            count = min(W, batch - first)
            G = np.empty((D, D, W), kind)
            A = np.empty((D, D, W), kind)
            N = np.empty((L, D, D, W), kind)
            r = np.empty((2, 1, D, W), kind)
            load(gram[stream[member]], first, count, G)
            for layer in range(L):
                for h in range(H):
                    shared_left(P[member, layer, h], G, A)
                    if h == 0:
                        shared_right_eye(A, Q[member, layer, h], N[layer])
                    else:
                        shared_right_add(A, Q[member, layer, h], N[layer])
                if layer < L - 1:
                    nn(N[layer], G, A)
                    nt_symmetric(A, N[layer], G)
            for depth in range(L + 1):
                r[:] = 0
                r[depth % 2, 0, D - 1] = 1
                for layer in range(depth - 1, -1, -1):
                    row(r[(layer + 1) % 2], N[layer], r[layer % 2])
                for b in range(count):
                    for i in range(D - 1):
                        out[member, first + b, depth, i] = -r[0, 0, i, b]

    return kernel
