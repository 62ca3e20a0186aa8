"""The linear model of every layer, and the momentum form of its steps, are the forward pass."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankone.icl import LinearTransformer, NoisyRegression, Uniform
from rankone.icl.theory import implicit_models, momentum_form, momentum_step
from rankone.icl.theory.implicit import omegas


def prompts(batch: int, dim: int, context: int, seed: int):
    task = NoisyRegression(dim=dim, context=context, noise=Uniform(0, 3))
    return task.sample(batch, generator=seed, dtype=torch.float64)


def gram_of(tokens: torch.Tensor) -> torch.Tensor:
    keys = tokens[:, :-1]
    return keys.mT @ keys


def model_of(kind: str, layers: int, heads: int, dim: int, seed: int) -> LinearTransformer:
    model = LinearTransformer(
        kind=kind, layers=layers, heads=heads, dim=dim, scale=0.15, generator=seed
    )
    return model.double()


@given(
    kind=st.sampled_from(["full", "diag", "gd++"]), layers=st.integers(1, 4),
    heads=st.integers(1, 3), dim=st.integers(1, 5), context=st.integers(1, 9),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_tokens_of_every_layer_are_those_of_the_linear_model(
    kind, layers, heads, dim, context, seed
):
    model = model_of(kind, layers, heads, dim, seed)
    tokens = prompts(3, dim, context, seed).tokens
    found = implicit_models(model, gram_of(tokens))
    x, y = tokens[..., :-1], tokens[..., -1]
    e = tokens
    P, Q = model.matrices()
    for layer in range(layers + 1):
        M, u, a, w = (part[:, layer] for part in found)
        want_x = torch.einsum("bij,bnj->bni", M, x) + y[..., None] * u[:, None]
        want_y = a[:, None] * y - torch.einsum("bj,bnj->bn", w, x)
        want = torch.cat([want_x, want_y[..., None]], dim=-1)
        torch.testing.assert_close(want, e, rtol=1e-10, atol=1e-10)
        if layer < layers:
            keys = e[:, :-1]
            gram = keys.mT @ keys
            e = e + torch.einsum("hij,bjk,hkl,bnl->bni", P[layer], gram, Q[layer], e)
    torch.testing.assert_close(
        torch.einsum("bj,bj->b", found.w[:, -1], x[:, -1]), model(tokens), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("wrong", ["plus", "c with w", "M after"])
@torch.no_grad()
def test_the_printed_versions_of_the_recursion_are_not_the_forward_pass(wrong):
    model, gram = model_of("full", 3, 2, 3, 1), gram_of(prompts(2, 3, 8, 0).tokens)
    d, (P, Q) = 3, model.matrices()
    M, a = torch.eye(d).double().expand(2, d, d), torch.ones(2).double()
    u = w = torch.zeros(2, d).double()
    for p, q in zip(P, Q, strict=True):
        block = (p @ gram[:, None] @ q).sum(1)
        A, b, c, rest = block[:, :d, :d], block[:, :d, d], block[:, d, :d], block[:, d, d]
        sign = 1 if wrong == "plus" else -1
        after = M + A @ M + sign * b[:, :, None] * w[:, None]
        with_c = u if wrong != "c with w" else w
        features = after if wrong == "M after" else M
        M, u, a, w = (
            after,
            u + (A @ u[..., None])[..., 0] + a[:, None] * b,
            a + rest * a + (c * with_c).sum(1),
            w + rest[:, None] * w - (features.mT @ c[..., None])[..., 0],
        )
        step = torch.eye(d + 1).double() + block
        gram = step @ gram @ step.mT
    tokens = prompts(2, 3, 8, 0).tokens
    want = model.implicit_weights(gram_of(tokens))
    wrong_a = implicit_models(model, gram_of(tokens)).a[:, -1]
    off = max(float((w - want).abs().max()), float((a - wrong_a).abs().max()))
    assert off > 1e-3


@pytest.mark.parametrize("kind", ["diag", "gd++"])
@pytest.mark.parametrize("heads", [1, 2])
def test_the_momentum_form_is_the_step_of_the_layer(kind, heads):
    model, gram = model_of(kind, 4, heads, 4, 3), gram_of(prompts(5, 4, 12, 2).tokens)
    layers, form = implicit_models(model, gram), momentum_form(model, gram)
    for layer in range(4):
        u, w = momentum_step(form, layer, layers.u[:, layer], layers.w[:, layer])
        torch.testing.assert_close(u, layers.u[:, layer + 1], rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(w, layers.w[:, layer + 1], rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_the_published_gamma_and_pi_have_one_factor_too_many():
    model, gram = model_of("diag", 3, 2, 4, 3), gram_of(prompts(5, 4, 12, 2).tokens)
    layers, form = implicit_models(model, gram), momentum_form(model, gram)
    a = layers.a[:, :-1, None, None]
    sums, moment = gram[:, :4, :4], gram[:, :4, 4]
    best = torch.linalg.solve(sums, moment)
    printed = layers.M[:, :-1] + a * layers.u[:, :-1, :, None] * best[:, None, None]
    form = form._replace(Pi=omegas(model)[:, 2, None, None] * layers.M[:, :-1].mT @ printed)
    _, first = momentum_step(form, 0, layers.u[:, 0], layers.w[:, 0])
    torch.testing.assert_close(first, layers.w[:, 1])  # nothing is wrong in the first layer
    _, third = momentum_step(form, 2, layers.u[:, 2], layers.w[:, 2])
    assert float((third - layers.w[:, 3]).abs().max()) > 1e-6


def test_gdpp_has_no_momentum_and_does_not_rescale():
    form = momentum_form(model_of("gd++", 2, 1, 3, 0), gram_of(prompts(2, 3, 9, 0).tokens))
    assert not form.Gamma.any()
    assert not form.s.any()


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_is_refused():
    full, diag = model_of("full", 1, 1, 3, 0), model_of("diag", 1, 1, 3, 0)
    gram = gram_of(prompts(2, 3, 2, 0).tokens)  # fewer examples than features
    with pytest.raises(ValueError, match="that of diag and gd\\+\\+ models, got a full one"):
        momentum_form(full, gram)
    with pytest.raises(ValueError, match="full models have matrices, not omegas"):
        omegas(full)
    with pytest.raises(ValueError, match="more examples than features"):
        momentum_form(diag, torch.zeros(1, 4, 4).double())
    for wrong in (gram[0], gram[:, :3], gram[:0]):
        with pytest.raises(ValueError, match=r"gram must have shape \[B, 4, 4\] with B >= 1, got"):
            implicit_models(diag, wrong)
    with pytest.raises(ValueError, match=r"dtype torch\.float64, got torch\.float32"):
        implicit_models(diag, gram.float())
