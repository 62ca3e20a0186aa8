import pytest
import torch

from rankone.icl.ahn.layers import (
    Matrices,
    as_transformer,
    count_b,
    losses,
    residuals,
    unwhiten,
    whiten,
)
from rankone.icl.ahn.measures import distance, multiple, shown
from rankone.icl.ahn.problem import Problem
from rankone.icl.ahn.products import product
from rankone.icl.ahn.spectrum import residual


def random_matrices(runs, layers, shared, *, seed=0, scale=0.3):
    g = torch.Generator().manual_seed(seed)
    A = scale * torch.randn(runs, layers, 5, 5, generator=g, dtype=torch.float64)
    return Matrices(A, scale * torch.randn(runs, shared, 5, 5, generator=g, dtype=torch.float64))


def test_products_are_those_of_single_matrices_and_so_are_their_gradients():
    g = torch.Generator().manual_seed(0)
    a = torch.randn(3, 4, 2, 1, generator=g, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, 5, 2, 6, generator=g, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(product(a, b), torch.einsum("ikrn,kjrm->ijrm", a, b))
    assert torch.autograd.gradcheck(product, (a, b))


def test_whitening_can_be_undone():
    problem, found = Problem(), random_matrices(2, 3, 2)
    for one, other in zip(unwhiten(whiten(found, problem), problem), found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("layers", "shared"), [(1, 0), (3, 0), (2, 1), (3, 2)])
def test_errors_are_those_of_the_transformers_implicit_weights(layers, shared):
    problem, found = Problem(context=7), random_matrices(2, layers, shared)
    _, _, w, _ = problem.sample(9, generator=1)
    sample = problem.sample_grams(9, generator=2)
    root, inverse = problem.power(0.5), problem.power(-0.5)
    maps = residuals(whiten(found, problem), sample.grams, torch.eye(5, dtype=w.dtype))
    for run in range(2):
        model = as_transformer(Matrices(found.A[run], found.B[run]), problem.context)
        implicit = model.implicit_weights(problem.token_grams(sample.grams[:, :, 0], w))
        errors = inverse @ maps[:, :, run].permute(2, 0, 1) @ root @ w[:, :, None]
        torch.testing.assert_close(w - implicit, errors.squeeze(2))


def test_lemma_1_a_layer_is_a_step_of_preconditioned_gradient_descent():
    """w_{l+1} = w_l - A_l grad R(w_l) with R(w) = (1/2n) sum (<w, x_i> - y_i)²; theirs is -A_l."""
    problem, found = Problem(context=8), random_matrices(1, 3, 0)
    prompts = problem.sample(6, generator=3)
    x, y = prompts.tokens[:, :-1, :-1], prompts.tokens[:, :-1, -1]
    model = as_transformer(Matrices(-found.A[0], found.B[0]), problem.context)
    w = torch.zeros(6, 5, dtype=x.dtype, requires_grad=True)
    steps = [w]
    for A in found.A[0]:
        risk = ((x @ w[:, :, None]).squeeze(2) - y).square().sum() / (2 * problem.context)
        # The query meets A, not its transpose: <w, x> gains -<A grad, x> with A transposed.
        w = w - torch.autograd.grad(risk, w)[0] @ A
        steps.append(w)
    keys = prompts.tokens[:, :-1]
    own = model.implicit_weights(keys.mT @ keys, every_layer=True)
    torch.testing.assert_close(own, torch.stack(steps, dim=1).detach())


def test_multiples_of_the_identity_are_polynomials_of_the_gram_matrix():
    a, b = torch.tensor([-0.4, -2.0, -5.0]).double(), torch.tensor([0.9, 0.5]).double()
    eye = torch.eye(5, dtype=torch.float64)
    white = Matrices(a[None, :, None, None] * eye, b[None, :, None, None] * eye)
    S = Problem().sample_grams(4, generator=0).grams
    maps = residuals(white, S, eye)[:, :, 0].permute(2, 0, 1)
    s, V = torch.linalg.eigh(S[:, :, 0].permute(2, 0, 1))
    torch.testing.assert_close(maps, V @ (residual(a, b, s.flatten()).view(4, 5)[..., None] * V.mT))


def test_losses_do_not_depend_on_chunks_or_on_other_runs(monkeypatch):
    problem, found = Problem(), random_matrices(3, 2, 1)
    sample = problem.sample_grams(50, generator=0)
    whole = losses(found, sample.grams, problem)
    monkeypatch.setattr("rankone.icl.ahn.layers.CHUNK", 21)
    torch.testing.assert_close(losses(found, sample.grams, problem), whole)
    one = Matrices(found.A[1:2], found.B[1:2])
    torch.testing.assert_close(losses(one, sample.grams, problem), whole[1:2])


def test_the_last_b_does_not_matter():
    problem = Problem()
    A, B = random_matrices(1, 2, 2)
    sample = problem.sample_grams(5, generator=0)
    less = losses(Matrices(A, B[:, :1]), sample.grams, problem)
    torch.testing.assert_close(losses(Matrices(A, B), sample.grams, problem), less)


def test_the_distance_is_that_to_the_nearest_multiple_of_the_identity():
    M = random_matrices(1, 3, 0).A[0]
    grid = torch.linspace(-2, 2, 4001, dtype=M.dtype)
    rest = M[:, None] - grid[:, None, None] * torch.eye(5, dtype=M.dtype)
    least = rest.norm(dim=(-2, -1)).min(1).values / M.norm(dim=(-2, -1))
    torch.testing.assert_close(distance(M), least, atol=1e-6, rtol=0)
    torch.testing.assert_close(multiple(M), M.diagonal(dim1=1, dim2=2).mean(1))


def test_what_is_shown_of_a_is_white_and_of_b_is_not():
    problem, found = Problem(), random_matrices(1, 2, 1)
    seen = shown(found, problem)
    torch.testing.assert_close(seen.A, whiten(found, problem).A)
    torch.testing.assert_close(seen.B, found.B)


def test_unknown_families_are_refused(unchecked):
    with pytest.raises(ValueError, match="family must be one of theorem3, theorem4, got 'x'"):
        count_b("x", 2)
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        count_b("theorem3", 0)
    assert (count_b("theorem3", 3), count_b("theorem4", 3)) == (0, 2)
