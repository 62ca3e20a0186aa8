import pytest
import torch

from rankone.icl.ahn.layers import Matrices, as_transformer, losses
from rankone.icl.ahn.problem import EIGENVALUES, Problem


def white_grams(problem, tokens):
    """S of token prompts [B, n+1, d+1]."""
    g = tokens[:, :-1, :-1] @ problem.power(-0.5)
    return (g.mT @ g / problem.context).permute(1, 2, 0)


def matrices(layers, *, seed=0, scale=0.2):
    g = torch.Generator().manual_seed(seed)
    whole = scale * torch.randn(2 * layers - 1, 5, 5, generator=g, dtype=torch.float64)
    return Matrices(whole[:layers] - 0.4 * torch.eye(5), whole[layers:])


def test_the_covariance_has_their_eigenvalues_and_is_rotated():
    problem = Problem(seed=3)
    U, D = problem.rotation, torch.tensor(EIGENVALUES, dtype=torch.float64)
    torch.testing.assert_close(U @ U.mT, torch.eye(5, dtype=U.dtype))
    torch.testing.assert_close(problem.covariance, U.mT @ D.diag() @ U)
    torch.testing.assert_close(torch.linalg.eigvalsh(problem.covariance), D.sort().values)
    torch.testing.assert_close(problem.power(0.5) @ problem.power(0.5), problem.covariance)
    assert (problem.covariance - Problem(seed=4).covariance).abs().max() > 0.1
    assert (problem.covariance - problem.covariance.diagonal().diag()).abs().max() > 0.05


@pytest.mark.parametrize("weights", ["inverse", "identity"])
def test_moments_of_the_data(weights):
    """200,000 prompts: standard errors of second moments are below 1 % of the largest."""
    problem = Problem(context=2, weights=weights)
    tokens, target, w, sigma = problem.sample(200_000, generator=0)
    x = tokens[:, :, :-1].reshape(-1, 5)
    torch.testing.assert_close(x.mT @ x / len(x), problem.covariance, atol=0.01, rtol=0)
    expected = problem.power(-1.0 if weights == "inverse" else 0.0)
    torch.testing.assert_close(w.mT @ w / len(w), expected, atol=0.2, rtol=0)
    torch.testing.assert_close(x.mean(0), torch.zeros_like(x[0]), atol=0.01, rtol=0)
    torch.testing.assert_close(tokens[:, :-1, -1], (tokens[:, :-1, :-1] @ w[..., None])[..., 0])
    torch.testing.assert_close(target, (tokens[:, -1, :-1] * w).sum(1))
    assert not tokens[:, -1, -1].any()
    assert not sigma.any()
    C = problem.start
    torch.testing.assert_close(C @ C.mT, problem.power(0.5) @ expected @ problem.power(0.5))


@pytest.mark.parametrize("context", [2, 5, 20])
@pytest.mark.parametrize("spiked", [False, True])
def test_moments_of_gram_matrices(context, spiked):
    """E S = I and E S² = (n + d + 1) / n I, with importance weights too; standard errors 1 %."""
    problem = Problem(context=context)
    spikes = problem.spikes(3) if spiked else ()
    grams, importance = problem.sample_grams(8000, generator=1, spikes=spikes)
    assert grams.shape == (5, 5, 1, 8000)
    assert importance.shape == (1, 8000)
    assert (importance == 1).all() != spiked
    S = grams[:, :, 0].permute(2, 0, 1)
    eye = torch.eye(5, dtype=S.dtype)
    mean = (importance[0, :, None, None] * S).mean(0)
    square = (importance[0, :, None, None] * (S @ S)).mean(0)
    torch.testing.assert_close(mean, eye, atol=0.06, rtol=0)
    torch.testing.assert_close(
        square.trace() / 5, eye[0, 0] * (context + 6) / context, rtol=0.06, atol=0
    )
    assert torch.linalg.matrix_rank(S[:50]).max() == min(context, 5)


def test_gram_matrices_of_tokens_come_from_white_ones():
    problem = Problem(context=7)
    tokens, _, w, _ = problem.sample(11, generator=0)
    keys = tokens[:, :-1]
    found = problem.token_grams(white_grams(problem, tokens), w)
    torch.testing.assert_close(found, keys.mT @ keys)


@pytest.mark.parametrize("weights", ["inverse", "identity"])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_loss_is_that_of_the_transformer_on_tokens(weights, layers):
    """Monte Carlo over 100,000 prompts, within four standard errors, with the 1/n in Q."""
    problem = Problem(context=6, weights=weights)
    model = as_transformer(matrices(layers, scale=0.05), problem.context)
    prompts = problem.sample(100_000, generator=2)
    with torch.no_grad():
        squares = (model(prompts.tokens) - prompts.target).square()
    error = squares.std() / len(squares) ** 0.5
    sample = problem.sample_grams(20_000, generator=3)
    own = losses(Matrices(*(m[None] for m in matrices(layers, scale=0.05))), sample.grams, problem)
    own_error = own.std() / own.numel() ** 0.5
    assert abs(own.mean() - squares.mean()) < 4 * (error.square() + own_error.square()).sqrt()
    assert error < 0.03 * squares.mean()


def test_the_loss_of_predicting_nothing_is_the_number_of_features():
    problem = Problem(context=4)
    zero = torch.zeros(1, 2, 5, 5, dtype=torch.float64)
    sample = problem.sample_grams(3, generator=0)
    torch.testing.assert_close(
        losses(Matrices(zero, zero[:, :1]), sample.grams, problem), torch.full((1, 3), 5.0).double()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 0}, "context must be at least 1, got 0"),
        ({"eigenvalues": (1.0, 0.0)}, "eigenvalues must be positive"),
        ({"eigenvalues": ()}, "eigenvalues must be positive"),
        ({"weights": "ones"}, "weights must be one of inverse, identity, got 'ones'"),
    ],
)
def test_wrong_problems_are_refused(change, message, unchecked):
    with pytest.raises(ValueError, match=message):
        Problem(**change)
