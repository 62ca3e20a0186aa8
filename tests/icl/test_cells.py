import pytest

from rankone.icl import cells
from rankone.icl.cells import NOISE_FREE_LIMIT, OWN_TAIL, make_table
from rankone.icl.presets import PRESETS
from rankone.icl.published import table1

PAPER = PRESETS["paper"]
PUBLISHED = table1()


def record(model, layers, noise, loss, *, seed=0, error=None, published_error=0.002, **more):
    error = 0.01 * (loss or 0) if error is None else error
    return {
        "model": model,
        "layers": layers,
        "noise": noise,
        "sigma": None,
        "loss": loss,
        "adjusted_loss": loss,
        "standard_error": error,
        "published_standard_error": published_error,
        "relative_error": error / loss if loss else None,
        "seed": None if layers is None else seed,
        "read_after": layers,
        **more,
    }


def only(records, restarts=None):
    (row,) = make_table(records, restarts or {}, PAPER)
    return row


def test_a_trained_cell_is_held_to_the_published_value_plus_two_errors():
    limit = PUBLISHED["full", 7, "sigma_5"] + 2 * 0.002
    for loss, within in [(limit - 1e-6, True), (limit + 1e-6, False), (0.04, True)]:
        row = only([record("full", 7, "sigma_5", loss)])
        assert row["published"] == 0.047
        assert row["limit"] == pytest.approx(limit)
        assert row["within"] is within


def test_a_cell_with_a_tail_of_its_own_is_held_to_the_published_value_alone():
    row = only([record("diag", 3, "sigma_7", 0.2438, error=0.12, published_error=0.35)])
    assert row["limit"] == PUBLISHED["diag", 3, "sigma_7"]
    assert row["within"] is False


def test_a_cell_with_a_tail_of_its_own_is_granted_no_error():
    for share, limit in [(0.9, 0.047 + 2 * 0.002), (1.1, 0.047)]:
        row = only(
            [
                record(
                    "full", 7, "sigma_5", 0.05, error=share * OWN_TAIL / PAPER.sequences**0.5 * 0.05
                )
            ]
        )
        assert row["limit"] == pytest.approx(limit)
        assert row["within"] is (share < 1)


def test_the_best_seed_is_shown_and_all_restarts_are_counted():
    records = [
        record("diag", 2, "sigma_5", None, seed=0),
        record("diag", 2, "sigma_5", 0.3, seed=1, error=0.1),
        record("diag", 2, "sigma_5", 0.2, seed=2, error=0.2),
    ]
    restarts = {f"diag-2-sigma_5-seed{seed}": count for seed, count in ((0, 5), (2, 1), (7, 9))}
    row = only(records, restarts)
    assert (row["adjusted_loss"], row["standard_error"], row["seed"]) == (0.2, 0.2, 2)
    assert (row["seeds"], row["restarts"]) == (3, 6)


def test_a_cell_without_a_finite_loss_is_not_within():
    row = only([record("diag", 2, "sigma_5", None)])
    assert row["adjusted_loss"] is None
    assert row["within"] is False


@pytest.mark.parametrize("model", ["gd++", "diag", "full"])
@pytest.mark.parametrize("layers", [5, 6, 7])
def test_noise_free_cells_of_five_layers_are_held_to_a_millionth(model, layers):
    row = only([record(model, layers, "sigma_0", 9e-7, published_error=0.0)])
    assert row["limit"] == NOISE_FREE_LIMIT == 1e-6
    assert row["within"] is True
    assert only([record(model, layers, "sigma_0", 2e-6)])["within"] is False


def test_noise_free_cells_of_four_layers_are_held_to_the_published_value():
    row = only([record("full", 4, "sigma_0", 1e-4, error=1e-6, published_error=1e-6)])
    assert row["limit"] == pytest.approx(1.63e-4 + 2e-6)


def test_an_impossible_gdpp_cell_is_held_to_the_population_value(monkeypatch):
    asked = []

    def gap(layers, dim, context, variance):
        asked.append((layers, dim, context, variance))
        return 5e-5

    monkeypatch.setattr(cells, "_gap", gap)
    ridge = record("constrr", None, "sigma_5", 0.3611)
    impossible = record("gd++", 7, "sigma_5", 0.3620, published_error=0.0053, error=0.0005)
    table = make_table([ridge, impossible], {}, PAPER)
    row = next(row for row in table if row["model"] == "gd++")
    assert row["limit"] == pytest.approx(max(0.344 + 2 * 0.0053, 0.3611 + 5e-5 + 2 * 0.0005))
    assert row["within"] is True
    assert asked == [(3, 10, 20, 25 / 3)]
    impossible["adjusted_loss"] = 0.3625
    assert make_table([ridge, impossible], {}, PAPER)[-1]["within"] is False


def test_a_possible_gdpp_cell_and_other_kinds_are_not_let_off(monkeypatch):
    monkeypatch.setattr(cells, "_gap", lambda *_: pytest.fail("no reason to ask"))
    ridge = record("constrr", None, "sigma_5", 0.3611)
    table = make_table(
        [ridge, record("gd++", 2, "sigma_5", 0.5), record("diag", 7, "sigma_5", 0.5)], {}, PAPER
    )
    assert [row["limit"] for row in table[1:]] == pytest.approx([0.366 + 0.004, 0.047 + 0.004])
    assert not any(row["within"] for row in table[1:])


def test_closed_forms_are_held_to_two_errors_either_way():
    for loss, within in [(0.360, True), (0.370, True), (0.355, False), (0.375, False)]:
        row = only([record("constrr", None, "sigma_5", loss, published_error=0.003)])
        assert row["within"] is within
        assert (row["seeds"], row["restarts"]) == (None, None)


def test_the_floor_is_that_of_the_same_noise():
    table = make_table(
        [
            record("bayes", None, "sigma_5", 0.04),
            record("bayes", None, "set_1_3", 0.005),
            record("oracle", None, "sigma_5", 0.0),
            record("full", 3, "set_1_3", 0.1),
        ],
        {},
        PAPER,
    )
    floors = {(row["model"], row["noise"]): row["floor"] for row in table}
    assert floors["full", "set_1_3"] == 0.005
    assert "oracle" not in {model for model, _ in floors}
    bayes = next(row for row in table if row["model"] == "bayes")
    assert (bayes["published"], bayes["limit"], bayes["within"]) == (None, None, None)


def test_profiles_and_early_layers_are_no_cells():
    records = [
        record("full", 3, "sigma_5", 0.1),
        record("full", 3, "sigma_5", 0.0, sigma=2.0),
        record("full", 3, "sigma_5", 0.0, read_after=2),
    ]
    records[1]["sigma"] = 2.0
    assert only(records)["adjusted_loss"] == 0.1
