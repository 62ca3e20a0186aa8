"""The page in headless Chromium: what it computes, what it shows, what it asks for."""

import json

import numpy as np
import pytest
import torch

from icl.browser import CHROMIUM, DRIVER, browser
from icl.test_page import CONTEXT, DIM, KINDS, decode, make_run, numbers
from rankone.icl.baselines import bayes_ridge, constant_ridge, oracle_ridge
from rankone.icl.ensemble import Run
from rankone.icl.folder import model_path
from rankone.icl.model import LinearTransformer
from rankone.icl.page import LONGEST, SHARED_PROMPTS, write_page
from rankone.tasks.noise import noise_from_name

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="needs chromium and chromedriver (Debian and Ubuntu: apt install chromium-driver)",
)

DEPTHS = (1, 2, 5)
TRAINED_ON = ("sigma_5", "set_1_3")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), depths=DEPTHS, noises=TRAINED_ON)


@pytest.fixture(scope="module")
def page(run, tmp_path_factory):
    return write_page(run, tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def shown(window, page):
    """The page, opened anew; it may not have complained when the test is over."""
    window.resize(1280)
    window.log("browser")
    window.open(page)
    window.settle()
    yield window
    assert [entry["message"] for entry in window.log("browser")] == []


def stored(run, kind, layers, noise):
    return LinearTransformer.load(model_path(run, Run(kind, layers, noise, 0)))


def model_of(run, kind, layers, noise):
    """As it is exported: rounded to float32."""
    return stored(run, kind, layers, noise).float().double()


def shared_tokens(page, index, sigma, examples):
    """Tokens of a shared prompt, from what is exported."""
    flat = torch.from_numpy(decode(numbers(page)["prompts"][index]).astype(float))
    longest = LONGEST * CONTEXT
    w, x, unit = flat.split([DIM, (longest + 1) * DIM, longest + 1])
    x = x.view(longest + 1, DIM)
    y = x @ w + sigma * unit
    query = torch.cat([x[-1], torch.zeros(1)])
    return torch.cat([torch.cat([x, y[:, None]], dim=1)[:examples], query[None]]).double(), w


def state(window):
    return window.run("return rankone.state()")


def text(window, name):
    return window.run("return document.getElementById(arguments[0]).textContent", name)


def slide(window, name, value):
    window.run(
        "const slider = document.getElementById(arguments[0]); slider.value = arguments[1];"
        "slider.dispatchEvent(new Event('input', { bubbles: true }))",
        name,
        value,
    )
    window.settle()


def pick(window, name, value):
    window.run(
        "const list = document.getElementById(arguments[0]); list.value = arguments[1];"
        "list.dispatchEvent(new Event('change', { bubbles: true }))",
        name,
        value,
    )
    window.settle()


def bars(window, name):
    values = window.run(
        "return [...document.querySelectorAll(`#bars rect.${arguments[0]}`)].map(r =>"
        "Number(r.dataset.value))",
        name,
    )
    return torch.tensor(values, dtype=torch.float64)


def values_of(window, selector):
    return window.run(
        "return [...document.querySelectorAll(arguments[0])].map(e => Number(e.dataset.value))",
        selector,
    )


def picture(window):
    """All that can be read and seen of the pictures."""
    return window.run("return document.querySelector('.panels').innerHTML")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise", TRAINED_ON)
def test_predictions_and_weights_are_those_of_pytorch(shown, run, page, kind, noise):
    for layers in DEPTHS:
        model = model_of(run, kind, layers, noise)
        name = f"{kind}-{layers}-{noise}"
        assert name in shown.run("return rankone.models()")
        for index in range(SHARED_PROMPTS):
            for sigma, examples in ((1.0, CONTEXT), (4.0, 7)):
                tokens, _ = shared_tokens(page, index, sigma, examples)
                there = shown.run("return rankone.tokens(...arguments)", index, sigma, examples)
                np.testing.assert_allclose(there, tokens, atol=1e-12)
                check_forward(shown, model, name, tokens)
                with torch.no_grad():
                    expected = float(stored(run, kind, layers, noise)(tokens[None]))
                got = shown.run("return rankone.predictions(...arguments)", name, there)
                assert got[-1] == pytest.approx(expected, abs=1e-5)


def check_forward(shown, model, name, tokens):
    """By tokens and by the Gram matrix, after every layer."""
    gram = (tokens[:-1].mT @ tokens[:-1])[None]
    with torch.no_grad():
        after_layers = model.predictions(tokens[None])[0]
        weights = model.implicit_weights(gram, every_layer=True)[0]
    got = shown.run("return rankone.predictions(...arguments)", name, tokens.tolist())
    np.testing.assert_allclose(got, after_layers, atol=1e-9, rtol=1e-9)
    got = shown.run("return rankone.weights(...arguments)", name, gram[0].tolist())
    np.testing.assert_allclose(got, weights, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", TRAINED_ON)
def test_baselines_are_those_of_the_laboratory(shown, page, name):
    noise = noise_from_name(name)
    for examples in (1, 4, DIM, CONTEXT, LONGEST * CONTEXT):
        for sigma in (0.0, 0.5, 3.0, 8.0):
            tokens, _ = shared_tokens(page, 0, sigma, examples)
            gram = (tokens[:-1].mT @ tokens[:-1])[None]
            given = (name, gram[0].tolist(), examples, sigma)
            got = shown.run("return rankone.baselines(...arguments)", *given)
            expected = {
                "oracle": oracle_ridge(gram, torch.tensor([sigma], dtype=torch.float64)),
                "constant": constant_ridge(gram, noise.mean_square),
                "bayes": bayes_ridge(gram, examples, noise),
            }
            assert got.keys() == expected.keys()
            for key, weights in expected.items():
                what = f"{key}, n = {examples}, σ = {sigma}"
                np.testing.assert_allclose(got[key], weights[0], atol=1e-7, err_msg=what)


def test_what_is_drawn_is_what_was_computed(shown, run, page):
    shown.click("#scopes button:last-child")
    slide(shown, "sigma", 1.5)
    slide(shown, "examples", 12)
    now = state(shown)
    model = model_of(run, now["kind"], now["layers"], now["noise"])
    tokens, w = shared_tokens(page, 0, 1.5, 12)
    gram = (tokens[:-1].mT @ tokens[:-1])[None]
    with torch.no_grad():
        weights = model.implicit_weights(gram, every_layer=True)[0]
    oracle = oracle_ridge(gram, torch.tensor([1.5], dtype=torch.float64))[0]
    for layer in range(now["layers"] + 1):
        slide(shown, "layer", layer)
        torch.testing.assert_close(bars(shown, "model"), weights[layer])
        torch.testing.assert_close(bars(shown, "truth"), w)
        torch.testing.assert_close(bars(shown, "oracle"), oracle)
    losses = (weights - w).square().sum(1) / 2
    np.testing.assert_allclose(values_of(shown, "#lines circle"), losses)
    (line,) = values_of(shown, "#lines line.oracle")
    assert line == pytest.approx(float((oracle - w).square().sum() / 2))


def test_arrow_keys_step_through_the_layers_and_stop_at_the_ends(shown):
    layers = state(shown)["layers"]
    assert state(shown)["layer"] == layers == max(DEPTHS)
    seen = []
    for layer in (*range(layers - 1, -1, -1), 0):
        shown.press("left")
        assert state(shown)["layer"] == layer
        assert text(shown, "layer-text") == f"After {layer} of {layers} layers"
        seen.append(bars(shown, "model").tolist())
    assert len({tuple(weights) for weights in seen}) == layers
    assert seen[-1] == [0.0] * DIM
    shown.press(*["right"] * (layers + 2))
    assert state(shown)["layer"] == layers


def test_arrow_keys_belong_to_the_slider_that_has_the_focus(shown):
    before = state(shown)
    shown.run("document.getElementById('sigma').focus()")
    shown.press("right", "right")
    now = state(shown)
    assert now["layer"] == before["layer"]
    assert now["sigma"] == pytest.approx(before["sigma"] + 0.1)
    shown.run("document.getElementById('layer').focus()")
    shown.press("left")
    assert state(shown)["layer"] == before["layer"] - 1


@pytest.mark.parametrize(("name", "value"), [("sigma", 3.3), ("examples", 9), ("layer", 2)])
def test_sliders_change_what_is_shown(shown, name, value):
    before = picture(shown)
    slide(shown, name, value)
    assert state(shown)[name] == value
    assert picture(shown) != before
    told = {"sigma": "3.30", "examples": "9", "layer": "After 2 of 5 layers"}[name]
    assert text(shown, "layer-text" if name == "layer" else f"{name}-value") == told


def test_buttons_step_through_the_layers(shown):
    shown.click("#back")
    assert state(shown)["layer"] == max(DEPTHS) - 1
    shown.click("#forth")
    assert state(shown)["layer"] == max(DEPTHS)
    assert shown.run("return document.getElementById('forth').disabled")


def test_what_was_not_seen_in_training_is_told(shown):
    assert text(shown, "warning") == ""
    slide(shown, "sigma", 7)
    slide(shown, "examples", 30)
    assert text(shown, "warning") == (
        f"σ = 7.00 was not seen in training. The model was trained with n = {CONTEXT}."
    )


def test_new_prompts_are_drawn_again_by_their_seed(shown, page):
    drawn = []
    for _ in range(2):
        shown.open(page)
        shown.settle()
        for seed in (1, 2):
            shown.click("#draw")
            assert state(shown)["prompt"] == {"seed": seed}
            assert text(shown, "prompt").endswith(f"drawn here, seed {seed}")
            drawn.append(tuple(bars(shown, "truth").tolist()))
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]
    pick(shown, "prompt", "2")
    assert state(shown)["prompt"] == {"shared": 2}
    torch.testing.assert_close(bars(shown, "truth"), shared_tokens(page, 2, 0.0, 1)[1])


def test_drawn_prompts_are_normal(shown):
    truth = []
    for _ in range(30):
        shown.click("#draw")
        truth += bars(shown, "truth").tolist()
    assert abs(np.mean(truth)) < 0.2
    assert 0.85 < np.std(truth) < 1.15


@pytest.mark.parametrize("kind", KINDS)
def test_every_model_can_be_chosen(shown, run, kind):
    for noise in TRAINED_ON:
        pick(shown, "noise", noise)
        shown.click(f'#kinds [data-value="{kind}"]')
        for layers in DEPTHS:
            shown.click(f'#depths [data-value="{layers}"]')
            now = state(shown)
            assert (now["kind"], now["layers"], now["noise"]) == (kind, layers, noise)
            assert now["layer"] == layers
            assert f"of {layers} layer" in text(shown, "layer-text")
            check_matrices(shown, model_of(run, kind, layers, noise), layers)


def check_matrices(shown, model, layer):
    """The heat maps and the four numbers are those of the layer."""
    P, Q = (matrix[layer - 1, 0].detach() for matrix in model.matrices())
    for name, matrix in (("P", P), ("Q", Q)):
        values = values_of(shown, f"#matrix-{name} td[tabindex]")
        np.testing.assert_allclose(values, matrix.flatten(), rtol=1e-12)
    hidden = shown.run("return document.getElementById('omegas').hidden")
    assert hidden == (model.kind == "full")
    if hidden:
        return
    for row, p in (("x", P[0, 0]), ("y", P[-1, -1])):
        for column, q in (("x", Q[0, 0]), ("y", Q[-1, -1])):
            told = text(shown, f"omega-{row}{column}").replace("−", "-")
            assert float(told) == pytest.approx(float(p * q), rel=0.06)


def test_entries_of_a_matrix_are_read_by_keyboard_and_pointer(shown, run):
    shown.click('#kinds [data-value="full"]')
    model = model_of(run, "full", max(DEPTHS), "sigma_5")
    Q = model.matrices()[1][-1, 0].detach()
    assert text(shown, "matrix-Q-text").startswith("Q of layer 5: from −")
    shown.run("document.querySelector('#matrix-Q td[tabindex=\"0\"]').focus()")
    assert text(shown, "matrix-Q-text").startswith("Q, row x₁, column x₁: ")
    shown.press("down", "down", "right", "up")
    told = text(shown, "matrix-Q-text")
    assert told.startswith("Q, row x₂, column x₂: ")
    assert float(told.split(": ")[1].replace("−", "-")) == pytest.approx(float(Q[1, 1]), rel=0.06)
    assert state(shown)["layer"] == max(DEPTHS)
    shown.press(*["down"] * 20, *["left"] * 20)
    assert text(shown, "matrix-Q-text").startswith("Q, row y, column x₁: ")
    shown.click("#matrix-P tr:nth-child(4) td:nth-child(12)")
    assert text(shown, "matrix-P-text").startswith("P, row x₃, column y: ")


def test_nothing_is_asked_of_the_network(shown, page):
    shown.log("performance")  # of the start of the browser
    shown.open(page)
    shown.click('#kinds [data-value="full"]')
    shown.click("#draw")
    assert shown.run("return performance.getEntriesByType('resource').length") == 0
    events = [json.loads(entry["message"])["message"] for entry in shown.log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    addresses = {params["request"]["url"] for params in sent}
    assert addresses - {"data:,"} == {page.resolve().as_uri()}


def test_the_policy_stops_what_others_add(shown):
    shown.run(
        "const script = document.createElement('script'); script.textContent = 'window.added = 1';"
        "document.body.append(script); const image = new Image(); image.src = 'page.png';"
    )
    assert shown.run("return window.added === undefined")
    complaints = [entry["message"] for entry in shown.log("browser")]
    assert len(complaints) == 2
    assert all("Content Security Policy" in complaint for complaint in complaints)


@pytest.mark.parametrize("width", [320, 390, 800, 1280])
def test_nothing_is_wider_than_the_window(shown, width):
    shown.resize(width)
    slide(shown, "sigma", 7)
    for kind in KINDS:
        shown.click(f'#kinds [data-value="{kind}"]')
        assert shown.run("return window.innerWidth") == width
        inside = shown.run("return document.documentElement.clientWidth")
        assert shown.run("return document.documentElement.scrollWidth") == inside
        edges = shown.run(
            "return [...document.querySelectorAll('body *')].map(e =>"
            "e.getBoundingClientRect().right)"
        )
        assert max(edges) <= inside + 1


def test_losses_that_explode_are_shown_on_the_edge(shown, page, run, tmp_path):
    other = make_run(tmp_path / "run", kinds=("full",), depths=(4,))
    LinearTransformer(kind="full", layers=4, scale=2.0).save(
        model_path(other, Run("full", 4, "sigma_5", 0))
    )
    shown.open(write_page(other, tmp_path / "page.html"))
    shown.settle()
    assert "beyond it" in text(shown, "lines-text")
    assert "beyond the frame" in text(shown, "scatter-text")
    assert "cut off" in text(shown, "bars-text")
    assert "NaN" not in picture(shown)


def test_one_noise_and_one_kind_leave_nothing_to_choose_there(shown, tmp_path):
    other = make_run(tmp_path / "run", kinds=("gd++",), depths=(3,), noises=("sigma_0",))
    shown.open(write_page(other, tmp_path / "page.html"))
    shown.settle()
    assert state(shown)["kind"] == "gd++"
    assert state(shown)["sigma"] == 0
    assert shown.run("return document.getElementById('noise-field').hidden")
    disabled = shown.run(
        "return [...document.querySelectorAll('#kinds button')].map(b => b.disabled)"
    )
    assert disabled == [True, True, False]
    slide(shown, "sigma", 1)
    assert "σ = 1.00 was not seen" in text(shown, "warning")


def test_colours_follow_the_system_and_the_button(shown):
    background = "return getComputedStyle(document.body).backgroundColor"
    light = shown.run(background)
    shown.resize(1280, dark=True)
    dark = shown.run(background)
    assert light != dark
    for _ in range(100):  # the system's word comes with one of the next pictures
        pressed = shown.run("return document.getElementById('theme').ariaPressed")
        if pressed == "true":
            break
        shown.settle()
    assert pressed == "true"
    shown.click("#theme")
    assert shown.run(background) == light
    shown.click("#theme")
    assert shown.run(background) == dark


def test_all_controls_have_names_and_are_reached_by_the_tab_key(shown):
    nodes = shown.devtools("Accessibility.getFullAXTree")["nodes"]
    controls = ("button", "slider", "combobox", "image", "table")
    named = [n for n in nodes if n.get("role", {}).get("value") in controls]
    assert len(named) > 15
    assert all(node["name"]["value"] for node in named)
    shown.run("document.activeElement.blur()")
    reached = []
    for _ in range(40):
        shown.press("tab")
        reached.append(
            shown.run(
                "const e = document.activeElement, s = getComputedStyle(e);"
                "return [e.id || e.dataset.value || e.tagName, s.outlineStyle]"
            )
        )
    wanted = {"theme", "full", "noise", "sigma", "examples", "prompt", "draw", "back", "layer"}
    assert wanted <= {name for name, _ in reached}
    assert all(outline != "none" for name, outline in reached if name != "BODY")
