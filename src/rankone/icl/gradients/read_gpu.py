# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
"""The read-out of every layer in float64 on the GPU: what an evaluation needs of a model.

One sequence a warp, matrices padded to 16 x 16 in registers, products on the float64 tensor cores
(a product of 16 x 16 matrices is two instructions). The transform T and the Gram matrix G go
through the layers without leaving the multiprocessor:

    N = I + sum_h P_h G Q_h,   T ← N T,   G ← N G Nᵀ,   weights after the layer = -T[d, :d].

A sequence reads D² numbers and writes (L + 1) d. The layers are a loop at run time, so that one
compilation serves all depths, and the diagonal kinds come as full matrices.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from rankone.icl.gradients.fused_gpu import _interpreted, _padded, _shared_matrix, _transpose

WARPS_A_PROCESSOR = 12
"""Programs that a multiprocessor holds at once; each walks through its share of the batch."""


def weights_after_layers(
    P: Float[Tensor, "R L H D D"],
    Q: Float[Tensor, "R L H D D"],
    gram: Float[Tensor, "S B D D"],
    stream: Int[Tensor, " R"],
) -> Float[Tensor, "R B L1 d"]:
    """Implicit weights of every model after 0, 1, …, L layers; all tensors in float64.

    Model r reads the sequences ``gram[stream[r]]``.
    """
    members, layers, heads, size, _ = P.shape
    batch = gram.shape[1]
    out = P.new_zeros(members, batch, layers + 1, size - 1)
    programs = 2
    if P.device.type == "cuda":
        processors = torch.cuda.get_device_properties(P.device).multi_processor_count
        programs = max(1, processors * WARPS_A_PROCESSOR // members)
    trips = triton.cdiv(batch, programs)
    bounds = (tl.constexpr(trips), tl.constexpr(layers)) if _interpreted() else (trips, layers)
    options = {} if _interpreted() else {"num_warps": 1, "num_stages": 1}
    _read_kernel[(members, programs)](
        P.contiguous(), Q.contiguous(), gram.contiguous(), stream, out, *bounds, batch,
        H=heads, D=size, DP=_padded(size), **options,
    )  # fmt: skip
    return out


@triton.jit
@no_type_check
def _product(a, b, c):
    return tl.dot(a, b, c, input_precision="ieee", out_dtype=tl.float64)


@triton.jit(do_not_specialize=["trips", "layers", "batch"])
@no_type_check
def _read_kernel(
    p_ptr,
    q_ptr,
    gram_ptr,
    stream_ptr,
    out_ptr,
    trips,
    layers,
    batch,
    H: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    member = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    i = tl.arange(0, DP)
    row = i[None, :, None]
    col = i[None, None, :]
    eye = tl.where((row == col) & (row < D), 1.0, 0.0).to(tl.float64)
    zero = tl.zeros([1, DP, DP], tl.float64)
    DD: tl.constexpr = D * D
    first = tl.load(stream_ptr + member).to(tl.int64) * batch
    for trip in range(trips):
        n = trip * programs + program
        inside = n < batch
        source = gram_ptr + (first + n) * DD + row * D + col
        g = tl.load(source, mask=inside & (row < D) & (col < D), other=0.0)
        t = eye
        target = out_ptr + (member * batch + n) * ((layers + 1) * (D - 1))
        for layer in range(layers):
            step = eye
            for h in tl.static_range(H):
                place = ((member * layers + layer) * H + h) * DD
                pg = _product(_shared_matrix(p_ptr + place, D, DP, 1), g, zero)
                step = _product(pg, _shared_matrix(q_ptr + place, D, DP, 1), step)
            t = _product(step, t, zero)
            read = tl.sum(tl.sum(tl.where(row == D - 1, -t, 0.0), axis=1), axis=0)
            target += D - 1
            tl.store(target + i, read, mask=inside & (i < D - 1))
            if layer + 1 < layers:
                ng = _product(step, g, zero)
                g = _product(ng, _transpose(step), zero)
