import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import gelu, pad

from rankone.layers import MECHANISMS, build
from rankone.models import Encoder, EncoderConfig
from rankone.models.encoder import POOLINGS, POSITIONS, sinusoids
from rankone.storage import read_tensors, write_tensors

DIM, HEADS, CLASSES, VOCABULARY, LONGEST = 12, 3, 3, 16, 40
OPTIONS = {
    "performer": {"features": 8},
    "rfa": {"features": 8},
    "linformer": {"rank": 4},
    "nystromformer": {"landmarks": 3, "convolution": 3},
    "longformer": {"window": 2, "global_tokens": 1},
    "bigbird": {"block": 2, "random": 1},
    "long_short": {"rank": 2, "window": 2},
}
SHIFTS = ("key.bias", "projection.bias")
"""Weights that a softmax leaves without an effect."""
every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)


def configure(mechanism="softmax", **changes):
    sizes = {"dim": DIM, "heads": HEADS, "mlp": 8, "classes": CLASSES, "max_length": LONGEST}
    options = {"vocabulary": VOCABULARY, "options": OPTIONS.get(mechanism, {})}
    return EncoderConfig(mechanism, **sizes | options | changes)


def make(mechanism="softmax", *, init=0, **changes):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(init)
        return Encoder(configure(mechanism, **changes)).double()


def draw(*shape, seed=0):
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@every_mechanism
@given(batch=st.integers(1, 3), length=st.integers(1, LONGEST), pair=st.booleans())
@settings(max_examples=4)
def test_every_sequence_or_pair_gets_a_score_for_each_class(mechanism, batch, length, pair):
    tokens = draw(batch, 2, length) if pair else draw(batch, length)
    scores = make(mechanism, pair=pair)(tokens)
    assert scores.shape == (batch, CLASSES)
    assert bool(scores.isfinite().all())


@every_mechanism
@given(
    length=st.integers(1, 25), more=st.integers(1, 15),
    pooling=st.sampled_from(POOLINGS), positions=st.sampled_from(POSITIONS),
)  # fmt: skip
@settings(max_examples=12)
def test_padding_at_the_end_changes_nothing(mechanism, length, more, pooling, positions):
    model, tokens = make(mechanism, pooling=pooling, positions=positions), draw(2, length)
    close(model(pad(tokens, (0, more))), model(tokens))


@every_mechanism
@pytest.mark.parametrize("pooling", POOLINGS)
def test_batch_mates_change_nothing(mechanism, pooling):
    model, tokens = make(mechanism, pooling=pooling), draw(3, 30)
    lengths = (30, 11, 1)
    for row, length in enumerate(lengths):
        tokens[row, length:] = 0
    alone = [model(tokens[row : row + 1, :length]) for row, length in enumerate(lengths)]
    close(model(tokens), torch.cat(alone))


@every_mechanism
def test_a_pair_is_two_sequences_that_are_encoded_apart(mechanism):
    model = make(mechanism, pair=True)
    first, second = draw(2, 21), draw(2, 9, seed=1)
    a, b = (model.encode(tokens, tokens != 0) for tokens in (first, second))
    want = model.head(torch.cat([a, b, a * b, a - b], dim=-1))
    close(model(torch.stack([first, pad(second, (0, 12))], dim=1)), want)


def test_a_block_adds_what_it_mixes_and_then_what_its_network_makes_of_each_token():
    model, tokens = make("linear", depth=1, positions="none"), draw(2, 7)
    (block,) = model.blocks
    x = model.embedding(tokens)
    x = x + block.mixer(block.norms[0](x))
    wide, _, _, narrow = block.mlp
    x = x + narrow(gelu(wide(block.norms[1](x))))
    close(model(tokens), model.head(model.norm(x).mean(1)))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_only_real_tokens_are_pooled(pooling):
    model, tokens = make(pooling=pooling), draw(2, 9)
    tokens[1, 4:] = 0
    seen = []
    model.norm.register_forward_hook(lambda module, given, x: seen.append(x))
    got = model.encode(tokens, tokens != 0)
    (x,) = seen
    assert x.shape[1] == (10 if pooling == "token" else 9)
    pool = {"mean": lambda y: y.mean(0), "max": lambda y: y.amax(0)}.get(pooling, lambda y: y[0])
    close(got, torch.stack([pool(x[0]), pool(x[1, :4])]))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_sequence_without_a_token_gets_finite_scores(pooling):
    model, tokens = make(pooling=pooling), draw(2, 9)
    tokens[1] = 0
    scores = model(tokens)
    assert bool(scores.isfinite().all())
    close(scores[:1], model(tokens[:1]))


def test_a_learned_token_reads_all_others():
    model, tokens = make(pooling="token"), draw(1, 6)
    scores = model(tokens)
    for place in range(6):
        other = tokens.clone()
        other[0, place] = other[0, place] % 15 + 1
        assert not torch.allclose(model(other), scores, rtol=1e-9, atol=1e-12)
    scores.sum().backward()
    assert bool(model.summary.grad.any())


def test_a_mask_says_which_tokens_are_real_whatever_they_are():
    model, tokens = make(), draw(2, 8)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[:, 5:] = False
    close(model(tokens, mask), model(tokens[:, :5]))
    tokens[:, 2] = 0
    assert not torch.allclose(model(tokens, torch.ones_like(mask)), model(tokens))


@pytest.mark.parametrize("positions", POSITIONS)
def test_the_order_of_tokens_matters_where_they_have_places(positions):
    model, tokens = make(positions=positions), draw(1, 10)
    same = torch.allclose(model(tokens), model(tokens.flip(1)), rtol=1e-9, atol=1e-12)
    assert same == (positions == "none")
    assert (model.places is not None) == (positions == "learned")


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_what_stands_for_a_place_is_added_to_the_token(positions):
    model, tokens = make(positions=positions), draw(2, 5)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    model(tokens)
    added = (seen[0] - model.embedding(tokens)).detach()
    close(added[0], added[1])
    want = sinusoids(5, DIM) if model.places is None else model.places.detach()
    height = added[0, 0, 1] / want[0, 1]
    assert height > 0
    close(added[0], height * want[:5].double())
    assert model.places is None or float(height) == pytest.approx(1)


@pytest.mark.parametrize("dim", [1, 6, 7])
def test_sinusoids_are_those_of_the_paper(dim):
    found = sinusoids(9, dim)
    assert found.shape == (9, dim)
    for place in (0, 1, 8):
        for n in range(dim):
            wave = math.cos if n % 2 else math.sin
            want = wave(place / 10_000 ** (n // 2 * 2 / dim))
            assert float(found[place, n]) == pytest.approx(want, abs=1e-6)


def test_dropout_drops_in_training_only():
    model, tokens = make(dropout=0.5), draw(2, 6)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    close(model(tokens), make()(tokens))


@pytest.mark.parametrize("mechanism", ["performer", "rfa"])
def test_projections_differ_by_layer_and_come_from_the_seed(mechanism):
    options = OPTIONS[mechanism] | {"seed": 5}
    first, second = (block.mixer.projection for block in make(mechanism, options=options).blocks)
    assert not torch.equal(first, second)
    for n, projection in enumerate((first, second)):
        alone = build(mechanism, dim=DIM, heads=HEADS, features=8, seed=5 + n)
        assert torch.equal(projection.float(), alone.projection)


def test_random_blocks_differ_by_layer():
    assert [block.mixer.seed for block in make("bigbird", depth=3).blocks] == [0, 1, 2]


def test_linformer_has_a_projection_for_every_layer_or_one_for_all():
    own = make("linformer")
    shared = make("linformer", options={"rank": 4, "share": "layerwise"}, depth=3)
    assert len({id(block.mixer.projections) for block in own.blocks}) == 2
    (projections,) = {block.mixer.projections for block in shared.blocks}
    assert projections.keys.shape[:2] == (1, 4)
    assert projections.own_values is None
    shared(draw(2, LONGEST)).sum().backward()
    assert bool(projections.keys.grad.any())


def test_layerwise_sharing_takes_no_other_option_away():
    narrow = make("linformer", options={"share": "layerwise", "head_dim": 3, "max_length": 50})
    assert [block.mixer.head_dim for block in narrow.blocks] == [3, 3]
    assert narrow.blocks[0].mixer.projections.keys.shape[2] == 50
    with pytest.raises(ValueError, match="linformer does not take these options"):
        make("linformer", options={"share": "layerwise", "features": 8})


@pytest.mark.parametrize(
    ("mechanism", "changes"),
    [*((name, {}) for name in MECHANISMS), ("linformer", {"options": {"share": "layerwise"}})],
)
def test_what_is_saved_and_loaded_gives_the_same_scores(mechanism, changes, tmp_path):
    model, other = make(mechanism, **changes), make(mechanism, init=1, **changes)
    tokens = draw(2, 17)
    assert not torch.equal(other(tokens), model(tokens))
    write_tensors(tmp_path / "model.safetensors", model.state_dict())
    other.load_state_dict(read_tensors(tmp_path / "model.safetensors")[0])
    assert torch.equal(other(tokens), model(tokens))


@every_mechanism
@pytest.mark.parametrize("pair", [False, True])
def test_gradients_reach_every_parameter(mechanism, pair):
    model = make(mechanism, pair=pair)
    model(draw(3, 2, 20) if pair else draw(3, 20)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if not name.endswith(SHIFTS):
            assert float(parameter.grad.abs().max()) > 1e-9, name


def test_padding_is_learned_nothing_about():
    model = make()
    model(pad(draw(2, 5), (0, 3))).sum().backward()
    assert not model.embedding.weight.grad[0].any()
    assert not model.places.grad[5:].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooling": "last"}, "pooling must be one of .*mean, first, max, got 'last'"),
        ({"positions": "rotary"}, "positions must be one of learned, sinusoidal, none, got 'rot"),
        ({"mechanism": "mamba"}, "mechanism must be one of softmax, linear, .*, got 'mamba'"),
        ({"heads": 5}, "heads must divide dim = 12"),
        ({"options": {"features": 8}}, "softmax does not take these options: .*features"),
    ],
)
def test_what_cannot_be_built_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize(("pair", "shape"), [(True, (4, 5)), (True, (2, 3, 5)), (False, (4, 2, 5))])
def test_tokens_are_of_pairs_only_where_pairs_are_classified(pair, shape, unchecked):
    wanted = r"\[B, 2, T\]" if pair else r"\[B, T\]"
    with pytest.raises(ValueError, match=rf"tokens must have shape {wanted}, got"):
        make(pair=pair)(draw(*shape))


@every_mechanism
@pytest.mark.parametrize("pooling", ["token", "mean"])
def test_a_sequence_that_is_too_long_is_refused(mechanism, pooling):
    model = make(mechanism, pooling=pooling, positions="none")
    model(draw(1, LONGEST))
    with pytest.raises(ValueError, match="up to max_length = 40 tokens, got 41"):
        model(draw(1, LONGEST + 1))
