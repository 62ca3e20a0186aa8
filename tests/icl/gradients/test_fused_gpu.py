"""The GPU kernels equal autograd in float64: natively with CUDA, else in Triton's interpreter."""

import os
import sys

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
if not CUDA and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

pytest.importorskip("triton")

from rankone.icl.gradients import (  # noqa: E402
    fused_gpu,
    loss_and_grad,
)
from rankone.icl.gradients.fused_gpu import (  # noqa: E402
    Variant,
    diag_loss_and_grad,
    full_loss_and_grad,
    variants,
)

DEVICE = "cuda" if CUDA else "cpu"
if not CUDA and not fused_gpu._interpreted():
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

pytestmark = [pytest.mark.gpu] if CUDA else []
TOLERANCE = {"bf16x6": 1e-5, "ieee": 1e-5, "tf32x3": 1e-4, "bf16x3": 1e-3, "tf32": 3e-2}

# members, streams, batch, layers, heads, dim
SHAPES = [
    (1, 1, 1, 1, 1, 3),
    (3, 2, 7, 1, 2, 10),
    (2, 2, 5, 2, 1, 10),
    (3, 2, 11, 3, 2, 3),
    (1, 1, 6, 5, 1, 10),
    (1, 1, 3, 3, 1, 16),
]
# Interpreted, what computes differently is held to the truth in all shapes. On a GPU everything
# worth timing is, but compiling takes seconds: all but the default in one shape only.
VARIANTS = variants() if CUDA else (Variant(), Variant("bf16x3", block=2), Variant("ieee", block=4))
CASES = [
    pytest.param(*shape, variant, id="-".join(map(str, shape + variant)))
    for variant in VARIANTS
    for shape in (SHAPES if variant == Variant() or not CUDA else SHAPES[3:4])
]
NAMES = ("members", "streams", "batch", "layers", "heads", "dim", "variant")


def _problem(
    members: int, streams: int, batch: int, dim: int, *, seed: int
) -> tuple[Tensor, Tensor, Tensor, torch.Generator]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(streams, batch, 2 * dim, dim, generator=g)
    w = torch.randn(streams, batch, dim, generator=g)
    y = x @ w[..., None] + torch.randn(streams, batch, 2 * dim, 1, generator=g)
    tokens = torch.cat([x, y], dim=-1)
    stream = torch.arange(members) % streams
    return tokens.mT @ tokens, w, stream, g


def _matrices(shape: tuple[int, ...], dim: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """P and Q that contract as trained ones do: small steps down, plus noise everywhere."""
    eye = torch.eye(dim + 1)
    p = eye + 0.2 * torch.randn(*shape, dim + 1, dim + 1, generator=g)
    q = (-eye + 0.2 * torch.randn(*shape, dim + 1, dim + 1, generator=g)) / (40 * dim * shape[-1])
    return p, q


def _loss(
    P: Tensor, Q: Tensor, gram: Tensor, weights: Tensor, stream: Tensor, omega: Tensor | None
) -> Tensor:
    """The definition, [R]; with omega the step is I + Ω ∘ G."""
    g, w = gram[stream], weights[stream]
    eye = torch.eye(g.shape[-1], dtype=g.dtype)
    product = eye
    for l in range(P.shape[1]):
        if omega is None:
            b = torch.einsum("rhij,rbjk,rhkm->rbim", P[:, l], g, Q[:, l])
        else:
            b = omega[:, l, None] * g
        n = eye + b
        product = n @ product
        g = n @ g @ n.mT
    return 0.5 * (-product[..., -1, :-1] - w).square().sum(-1).mean(-1)


def _spread(omega: Tensor, dim: int) -> Tensor:
    """[R, L, 4] to [R, L, D, D]."""
    y = torch.zeros(dim + 1, dtype=torch.long)
    y[-1] = 1
    return omega[..., 2 * y[:, None] + y[None, :]]


def _assert_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Relative to the largest entry of a member's tensor."""
    got, want = got.double().cpu(), want.double()
    scale = want.abs().flatten(1).amax(1) if want.ndim > 1 else want.abs()
    error = (got - want).abs()
    error = error.flatten(1).amax(1) if want.ndim > 1 else error
    assert got.shape == want.shape
    assert torch.all(error <= tolerance * scale), (error / scale).max().item()


@pytest.mark.parametrize(NAMES, CASES)
def test_full_equals_autograd(
    members: int, streams: int, batch: int, layers: int, heads: int, dim: int, variant: Variant
) -> None:
    gram, w, stream, g = _problem(members, streams, batch, dim, seed=layers)
    P, Q = _matrices((members, layers, heads), dim, g)
    P64, Q64 = P.double().requires_grad_(), Q.double().requires_grad_()
    loss = _loss(P64, Q64, gram.double(), w.double(), stream, None)
    dP, dQ = torch.autograd.grad(loss.sum(), (P64, Q64))
    got = full_loss_and_grad(
        *(x.to(DEVICE) for x in (P, Q, gram, w, stream, torch.ones(gram.shape[:2]))),
        variant=variant,
    )
    for ours, truth in zip(got, (loss.detach(), dP, dQ), strict=True):
        _assert_close(ours, truth, TOLERANCE[variant.precision])


@pytest.mark.parametrize(NAMES, CASES)
def test_diag_equals_autograd(
    members: int, streams: int, batch: int, layers: int, heads: int, dim: int, variant: Variant
) -> None:
    gram, w, stream, g = _problem(members, streams, batch, dim, seed=layers)
    omega = -(0.5 + torch.rand(members, layers, 4, generator=g)) / (40 * dim)
    omega64 = omega.double().requires_grad_()
    loss = _loss(omega64, omega64, gram.double(), w.double(), stream, _spread(omega64, dim))
    (domega,) = torch.autograd.grad(loss.sum(), omega64)
    got = diag_loss_and_grad(
        *(x.to(DEVICE) for x in (omega, gram, w, stream, torch.ones(gram.shape[:2]))),
        variant=variant,
    )
    for ours, truth in zip(got, (loss.detach(), domega), strict=True):
        _assert_close(ours, truth, TOLERANCE[variant.precision])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_diverged_member_spoils_no_other() -> None:
    gram, w, stream, g = _problem(3, 1, 5, 4, seed=0)
    P, Q = _matrices((3, 3, 1), 4, g)
    alone = full_loss_and_grad(
        *(x.to(DEVICE) for x in (P, Q, gram, w, stream, torch.ones(gram.shape[:2])))
    )
    P[1] = 1e30
    mixed = full_loss_and_grad(
        *(x.to(DEVICE) for x in (P, Q, gram, w, stream, torch.ones(gram.shape[:2])))
    )
    assert not torch.isfinite(mixed[0][1])
    for a, b in zip(alone, mixed, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])


def test_equal_inputs_give_equal_bits() -> None:
    gram, w, stream, g = _problem(2, 1, 9, 10, seed=0)
    P, Q = _matrices((2, 2, 1), 10, g)
    inputs = [x.to(DEVICE) for x in (P, Q, gram, w, stream, torch.ones(gram.shape[:2]))]
    for a, b in zip(full_loss_and_grad(*inputs), full_loss_and_grad(*inputs), strict=True):
        assert torch.equal(a, b)


def test_the_last_layer_of_p_has_a_gradient_in_its_last_row_only() -> None:
    gram, w, stream, g = _problem(1, 1, 4, 3, seed=0)
    P, Q = _matrices((1, 2, 1), 3, g)
    _, dP, _ = full_loss_and_grad(
        *(x.to(DEVICE) for x in (P, Q, gram, w, stream, torch.ones(gram.shape[:2])))
    )
    assert torch.count_nonzero(dP[:, -1, :, :-1]) == 0
    assert torch.count_nonzero(dP[:, -1, :, -1]) > 0


def test_members_may_have_limits_of_their_own() -> None:
    gram, w, stream, g = _problem(3, 1, 9, 4, seed=0)
    P, Q = _matrices((3, 2, 1), 4, g)
    data = [x.to(DEVICE) for x in (P, Q, gram, w, stream, torch.ones(gram.shape[:2]))]
    limits = torch.tensor([torch.inf, 0.05, 20.0])
    mixed = full_loss_and_grad(*data, limits.to(DEVICE))
    exact = [x.double() if x.is_floating_point() else x for x in (P, Q, gram, w, stream)]
    want = loss_and_grad("full", *exact, limit=limits.double(), impl="reference")
    for ours, truth in zip(mixed, want, strict=True):
        _assert_close(ours, truth, TOLERANCE["bf16x6"])
