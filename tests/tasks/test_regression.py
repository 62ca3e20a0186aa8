import pytest
import torch

from rankone.tasks.noise import Categorical, Fixed, Uniform
from rankone.tasks.regression import NoisyRegression, as_generator, bartlett

COVARIANCE = torch.tensor([[2.0, 0.6, 0.0], [0.6, 1.0, -0.3], [0.0, -0.3, 0.5]])
TASKS = {
    "n=20": NoisyRegression(dim=3, context=20, noise=Uniform(0, 5)),
    "n=5<d": NoisyRegression(dim=7, context=5, noise=Uniform(0, 2)),
    "n=1": NoisyRegression(dim=2, context=1, noise=Fixed(0.5)),
    "covariance": NoisyRegression(
        dim=3, context=20, noise=Categorical((1, 3)), covariance=COVARIANCE
    ),
}
each_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())


def gram_of_tokens(tokens):
    keys = tokens[:, :-1]
    return keys.mT @ keys


def lower(gram):
    i, j = torch.tril_indices(gram.shape[1], gram.shape[2])
    return gram[:, i, j]


def assert_same_mean(a, b, sigmas=4.5):
    error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
    far = ((a.mean(0) - b.mean(0)).abs() / error.clamp_min(1e-12)).max()
    assert float(far) < sigmas


@each_task
def test_gram_and_token_samplers_agree_in_distribution(task):
    prompts = task.sample(60_000, generator=1, dtype=torch.float64)
    grams = task.sample_gram(60_000, generator=2, dtype=torch.float64)
    a = torch.cat([lower(gram_of_tokens(prompts.tokens)), prompts.weights], dim=1)
    b = torch.cat([lower(grams.gram), grams.weights], dim=1)
    assert_same_mean(a, b)
    # Variances and covariances of the entries, those with the weights among them.
    centre = a.mean(0)
    a, b = (a - centre), (b - centre)
    i, j = torch.tril_indices(a.shape[1], a.shape[1])
    assert_same_mean(a[:, i] * a[:, j], b[:, i] * b[:, j])
    assert_same_mean(prompts.sigma[:, None], grams.sigma[:, None])


def test_gram_matrices_are_symmetric_and_of_the_rank_of_their_context():
    drawn = TASKS["n=5<d"].sample_gram(50, generator=0, dtype=torch.float64)
    assert torch.equal(drawn.gram, drawn.gram.mT)
    assert torch.linalg.matrix_rank(drawn.gram, hermitian=True).tolist() == [5] * 50


def test_noise_free_grams_hold_exact_labels():
    task = NoisyRegression(dim=4, context=9, noise=Fixed(0))
    gram, weights, _ = task.sample_gram(20, generator=0, dtype=torch.float64)
    features = gram[:, :-1, :-1]
    expected = (features @ weights[:, :, None]).squeeze(-1)
    torch.testing.assert_close(gram[:, :-1, -1], expected)
    torch.testing.assert_close(gram[:, -1, -1], (expected * weights).sum(1))


def test_a_gram_of_twenty_thousand_examples_costs_no_more_memory_than_one_of_twenty():
    task = NoisyRegression(dim=10, context=20_000, noise=Uniform(0, 5))
    gram = task.sample_gram(1000, generator=0).gram
    assert gram.shape == (1000, 11, 11)
    diagonal = gram.diagonal(dim1=1, dim2=2)[:, :-1]
    assert float(diagonal.mean()) == pytest.approx(20_000, rel=1e-2)
    g = as_generator(0)
    assert bartlett(2, 11, 20_000, generator=g).shape == (2, 11, 11)


@each_task
def test_the_query_has_no_label_and_a_target_without_noise(task):
    tokens, target, weights, _ = task.sample(40, generator=3, dtype=torch.float64)
    assert bool((tokens[:, -1, -1] == 0).all())
    torch.testing.assert_close(target, (tokens[:, -1, :-1] * weights).sum(1))


def test_labels_deviate_from_the_truth_by_the_prompts_own_sigma():
    task = NoisyRegression(dim=3, context=4000, noise=Categorical((1, 3)))
    tokens, _, weights, sigma = task.sample(20, generator=3, dtype=torch.float64)
    noise = tokens[:, :-1, -1] - (tokens[:, :-1, :-1] @ weights[:, :, None]).squeeze(-1)
    torch.testing.assert_close(noise.std(1), sigma, rtol=0.06, atol=0)


@each_task
@pytest.mark.parametrize("draw", ["sample", "sample_gram"])
def test_the_same_seed_gives_the_same_prompts(task, draw):
    first = getattr(task, draw)(5, generator=7)
    again = getattr(task, draw)(5, generator=torch.Generator().manual_seed(7))
    other = getattr(task, draw)(5, generator=8)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert first[0].dtype == torch.float32


def test_prompts_do_not_depend_on_the_noises_beside_them():
    task = TASKS["n=20"]
    noises = [Uniform(0, 5), Fixed(1), Categorical((1, 3))]
    together = task.sample_grams(16, noises, 5)
    for k, noise in enumerate(noises):
        alone = task.sample_grams(16, [noise], 5)
        assert all(torch.equal(a[k], b[0]) for a, b in zip(together, alone, strict=True))
    assert torch.equal(together.gram[0], task.sample_gram(16, generator=5).gram)


SPIKES = {"spikes": (1.5, 2.0, 3.0), "share": 0.4}


def streams(count):
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def test_importance_weights_have_mean_one_and_are_bounded():
    _, weight = TASKS["n=20"].sample_spiked(2000, [Fixed(1)], streams(25), torch.float64, **SPIKES)
    assert weight.shape == (25, 2000)
    assert bool((weight > 0).all())
    assert bool((weight <= 1 / (1 - SPIKES["share"]) + 1e-9).all())
    assert float(weight.mean()) == pytest.approx(1, abs=4 * float(weight.std()) / 50_000**0.5)


@each_task
def test_weighted_means_of_spiked_prompts_are_unbiased(task):
    drawn, weight = task.sample_spiked(2000, [task.noise], streams(30), torch.float64, **SPIKES)
    plain = task.sample_gram(60_000, generator=500, dtype=torch.float64)
    spiked, plain = lower(drawn.gram[:, 0].flatten(0, 1)), lower(plain.gram)
    weight = weight.flatten()[:, None]
    assert_same_mean(weight * spiked, plain)
    assert_same_mean(weight * spiked.square(), plain.square())
    # … and the prompts themselves are longer: unweighted means are not the same.
    assert float(spiked[:, 0].mean()) > 1.02 * float(plain[:, 0].mean())


def test_spiked_prompts_measure_rare_eigenvalues_better():
    """One prompt in 10,000 has an eigenvalue above 84; spiked prompts hold thousands of them."""
    task = NoisyRegression(dim=10, context=20, noise=Fixed(1))

    def above(gram, weight):
        top = torch.linalg.eigvalsh(gram[..., :10, :10])[..., -1]
        return (weight * (top > 84)).flatten()

    drawn, weight = task.sample_spiked(2000, [Fixed(1)], streams(20), torch.float64, **SPIKES)
    plain, ones = task.sample_spiked(2000, [Fixed(1)], streams(20), torch.float64)
    spiked, rare = above(drawn.gram[:, 0], weight), above(plain.gram[:, 0], ones)
    error = float(spiked.std()) / 40_000**0.5
    assert error < 0.3 * float(rare.std()) / 40_000**0.5
    assert float(spiked.mean()) == pytest.approx(1.2e-4, abs=4 * error)


def test_without_spikes_all_weights_are_one_and_prompts_as_ever():
    task = TASKS["n=20"]
    drawn, weight = task.sample_spiked(9, [task.noise], [torch.Generator().manual_seed(4)])
    assert bool((weight == 1).all())
    assert torch.equal(drawn.gram[0, 0], task.sample_gram(9, generator=4).gram)


@pytest.mark.parametrize(("spikes", "share"), [((0.5,), 0.5), ((2.0,), 1.0), ((2.0,), -0.1)])
def test_spikes_that_leave_weights_unbounded_are_refused(spikes, share):
    with pytest.raises(ValueError, match="leave plain prompts"):
        TASKS["n=20"].sample_spiked(9, [Fixed(1)], streams(1), spikes=spikes, share=share)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="dim must be a whole number of at least 1, got 0"):
        NoisyRegression(dim=0, context=20, noise=Fixed(1))
    with pytest.raises(ValueError, match="context must be a whole number of at least 1, got 0"):
        NoisyRegression(dim=2, context=0, noise=Fixed(1))
    for draw in (TASKS["n=20"].sample, TASKS["n=20"].sample_gram):
        with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
            draw(0, generator=0)


def test_negative_noise_is_refused():
    with pytest.raises(ValueError, match="got -1"):
        NoisyRegression(dim=2, context=3, noise=Uniform(0, -1))


@pytest.mark.usefixtures("unchecked")
def test_a_number_is_not_a_noise():
    with pytest.raises(ValueError, match="noise must be Uniform, Categorical or Fixed, got 5"):
        NoisyRegression(dim=2, context=3, noise=5)


@pytest.mark.parametrize(
    "covariance",
    [
        torch.tensor([[1.0, 2.0], [2.0, 1.0]]),
        torch.tensor([[1.0, 0.5], [0.0, 1.0]]),
        torch.zeros(2, 2),
    ],
    ids=["indefinite", "asymmetric", "zero"],
)
def test_a_matrix_that_is_no_covariance_is_refused(covariance):
    with pytest.raises(ValueError, match="symmetric and positive definite"):
        NoisyRegression(dim=2, context=3, noise=Fixed(1), covariance=covariance)


def test_a_covariance_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"\[d, d\] = \(2, 2\), got \(3, 3\)"):
        NoisyRegression(dim=2, context=3, noise=Fixed(1), covariance=torch.eye(3))


@pytest.mark.usefixtures("unchecked")
def test_sizes_that_are_not_whole_and_dtypes_that_cannot_be_drawn_are_refused():
    with pytest.raises(ValueError, match=r"a whole number of at least 1, got 2\.5"):
        NoisyRegression(dim=2, context=2.5, noise=Fixed(1))
    for dtype in (torch.int64, torch.float16):
        for draw in (TASKS["n=20"].sample, TASKS["n=20"].sample_gram):
            with pytest.raises(ValueError, match=f"float32 or torch.float64, got {dtype}"):
                draw(2, generator=0, dtype=dtype)
