import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankone.icl.model import KINDS, LinearTransformer, parameter_shapes
from rankone.tasks.noise import Uniform
from rankone.tasks.regression import NoisyRegression


def random_model(kind, layers, dim, heads, *, seed=0, scale=0.1):
    g = torch.Generator().manual_seed(seed)
    shapes = parameter_shapes(kind, layers, dim, heads)
    p, q = (scale * torch.randn(shapes[k], generator=g, dtype=torch.float64) for k in "pq")
    return LinearTransformer.from_parameters(kind, p, q, dim)


def tokens_of(dim, context, batch=3, seed=1):
    task = NoisyRegression(dim=dim, context=context, noise=Uniform(0, 2))
    return task.sample(batch, generator=seed, dtype=torch.float64).tokens


def plain_loops(P, Q, prompt):
    """e_i + sum_h P_h (sum_{j<=n} e_j e_jᵀ) Q_h e_i in lists and loops; -y of the query a layer."""
    L, H, D, _ = P.shape
    P, Q, e = P.tolist(), Q.tolist(), prompt.tolist()
    n = len(e) - 1
    read = [-e[n][D - 1]]
    for layer in range(L):
        after = [list(token) for token in e]
        for i in range(n + 1):
            for h in range(H):
                query = [sum(Q[layer][h][a][b] * e[i][b] for b in range(D)) for a in range(D)]
                for j in range(n):
                    score = sum(e[j][a] * query[a] for a in range(D))
                    for a in range(D):
                        after[i][a] += score * sum(P[layer][h][a][b] * e[j][b] for b in range(D))
        e = after
        read.append(-e[n][D - 1])
    return read


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (3, 2)])
def test_token_forward_equals_plain_loops(kind, layers, heads):
    model = random_model(kind, layers, 3, heads)
    tokens = tokens_of(3, 5)
    expected = torch.tensor(
        [plain_loops(*(m.detach() for m in model.matrices()), prompt) for prompt in tokens],
        dtype=torch.float64,
    )
    with torch.no_grad():
        torch.testing.assert_close(model.predictions(tokens), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(model(tokens), expected[:, -1], rtol=1e-12, atol=1e-12)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    layers=st.integers(1, 4),
    heads=st.integers(1, 3),
    dim=st.integers(1, 6),
    context=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_gram_forward_equals_token_forward(kind, layers, heads, dim, context, seed):
    model = random_model(kind, layers, dim, heads, seed=seed, scale=0.1)
    tokens = tokens_of(dim, context, seed=seed)
    keys = tokens[:, :-1]
    with torch.no_grad():
        weights = model.implicit_weights(keys.mT @ keys, every_layer=True)
        last = model.implicit_weights(keys.mT @ keys)
        predicted = model.predictions(tokens)
    assert weights.shape == (3, layers + 1, dim)
    assert bool((weights[:, 0] == 0).all())
    assert torch.equal(weights[:, -1], last)
    read = (weights @ tokens[:, -1, :-1, None]).squeeze(-1)
    torch.testing.assert_close(read, predicted, rtol=1e-9, atol=1e-9)


def test_the_prediction_after_a_layer_is_that_of_the_shorter_model():
    model = random_model("full", 3, 4, 2)
    P, Q = (m.detach() for m in model.matrices())
    tokens = tokens_of(4, 6)
    with torch.no_grad():
        every = model.predictions(tokens)
        assert bool((every[:, 0] == 0).all())
        for depth in (1, 2):
            short = LinearTransformer.from_matrices(P[:depth], Q[:depth])
            torch.testing.assert_close(short(tokens), every[:, depth])


def test_the_query_does_not_act_on_the_other_queries():
    model = random_model("full", 2, 3, 1)
    tokens = tokens_of(3, 4)
    doubled = tokens.clone()
    doubled[:, -1] *= 2
    with torch.no_grad():
        torch.testing.assert_close(model(doubled), 2 * model(tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_and_back_is_the_same_model(kind):
    model = random_model(kind, 2, 3, 2)
    P, Q = model.matrices()
    assert P.shape == Q.shape == (2, 2, 4, 4)
    full = LinearTransformer.from_matrices(P, Q)
    assert (full.kind, full.layers, full.heads, full.dim) == ("full", 2, 2, 3)
    again = full.matrices()
    assert torch.equal(again[0], P)
    assert torch.equal(again[1], Q)
    tokens = tokens_of(3, 5)
    with torch.no_grad():
        assert torch.equal(full(tokens), model(tokens))


@pytest.mark.parametrize(
    ("kind", "numbers"), [("full", 2 * 3 * 2 * 121), ("diag", 2 * 3 * 4), ("gd++", 2 * 3 * 3)]
)
def test_parameters_are_counted_as_in_the_paper(kind, numbers):
    model = LinearTransformer(kind=kind, layers=3, dim=10, heads=2)
    assert sum(parameter.numel() for parameter in model.parameters()) == numbers


def test_diagonal_kinds_have_their_structure():
    for kind in ("diag", "gd++"):
        P, Q = random_model(kind, 2, 3, 2).matrices()
        for matrix in (P, Q):
            assert torch.equal(matrix, torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1)))
            x = matrix.diagonal(dim1=-2, dim2=-1)[..., :-1]
            assert torch.equal(x, x[..., :1].expand_as(x))
        assert bool((P[..., -1, -1] != 0).all())
        assert bool((Q[..., -1, -1] == 0).all()) == (kind == "gd++")


def test_initial_parameters_follow_the_seed():
    first, again, other = (
        LinearTransformer(kind="full", layers=1, dim=2, generator=s) for s in (1, 1, 2)
    )
    assert torch.equal(first.p, again.p)
    assert not torch.equal(first.p, other.p)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_saved_is_loaded(kind, tmp_path):
    model = random_model(kind, 2, 3, 2)
    model.save(tmp_path / "m.safetensors")
    again = LinearTransformer.load(tmp_path / "m.safetensors")
    assert (again.kind, again.layers, again.dim, again.heads) == (kind, 2, 3, 2)
    assert torch.equal(again.p, model.p)
    assert torch.equal(again.q, model.q)


def test_inputs_of_another_dtype_are_refused():
    model = LinearTransformer(kind="full", layers=1, dim=2)
    for name, call, shape in (
        ("tokens", model, (1, 4, 3)),
        ("gram", model.implicit_weights, (1, 3, 3)),
    ):
        with pytest.raises(ValueError, match=rf"{name} must be of .*float32, got torch.float64"):
            call(torch.zeros(shape, dtype=torch.float64))


def test_matrices_of_two_dtypes_are_refused():
    P = torch.zeros(1, 1, 3, 3)
    with pytest.raises(ValueError, match=r"of one dtype, got torch.float32 .* torch.float64"):
        LinearTransformer.from_matrices(P, P.double())


def test_a_damaged_file_is_refused(tmp_path):
    file = tmp_path / "m.safetensors"
    random_model("full", 2, 3, 1).save(file)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"m\.safetensors: truncated"):
        LinearTransformer.load(file)
    with pytest.raises(ValueError, match="no such file"):
        LinearTransformer.load(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("names", "facts"),
    [
        ("pq", {"kind": "fuller", "dim": "3"}),
        ("pq", {"kind": "full"}),
        ("pq", {"kind": "full", "dim": "three"}),
        ("pq", {"kind": "full", "dim": "7"}),
        ("pq", {"kind": "diag", "dim": "3"}),
        ("p", {"kind": "full", "dim": "3"}),
    ],
)
def test_tensors_that_are_no_model_are_refused(names, facts, tmp_path):
    from rankone.storage import write_tensors

    write_tensors(tmp_path / "m", {name: torch.zeros(1, 1, 4, 4) for name in names}, facts)
    with pytest.raises(ValueError, match=r"does not hold|must have shape|invalid literal"):
        LinearTransformer.load(tmp_path / "m")


@pytest.mark.usefixtures("unchecked")
class TestBadInput:
    def test_an_unknown_kind_is_told_the_known_ones(self):
        with pytest.raises(ValueError, match=r"one of full, diag, gd\+\+, got 'gd'"):
            LinearTransformer(kind="gd", layers=1, dim=2)

    @pytest.mark.parametrize("name", ["layers", "dim", "heads"])
    def test_sizes_are_at_least_one(self, name):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            LinearTransformer(**({"kind": "full", "layers": 1, "dim": 1, "heads": 1} | {name: 0}))

    @pytest.mark.parametrize("shape", [(2, 6, 5), (2, 1, 4), (6, 4)])
    def test_tokens_of_another_shape_are_refused(self, shape):
        model = LinearTransformer(kind="full", layers=1, dim=3)
        with pytest.raises(ValueError, match=r"tokens must have shape \[B, n\+1, d\+1\]"):
            model(torch.zeros(shape))

    @pytest.mark.parametrize("shape", [(2, 5, 5), (2, 4, 3), (4, 4)])
    def test_grams_of_another_shape_are_refused(self, shape):
        model = LinearTransformer(kind="full", layers=1, dim=3)
        with pytest.raises(ValueError, match=r"gram must have shape \[B, 4, 4\]"):
            model.implicit_weights(torch.zeros(shape))

    def test_matrices_of_two_shapes_are_refused(self):
        with pytest.raises(ValueError, match=r"\[L, H, d\+1, d\+1\], got"):
            LinearTransformer.from_matrices(torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 4, 4))
