"""Figures 1 to 7 adapt to the records and are the same bytes each time."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from rankone.report.curves import EXPLODED, Curve, Curves
from rankone.report.figures import FIGURES, draw, fig1, fig2, fig4, fig5, fig7, render, save
from rankone.report.records import NothingToShowError, parse_noise

MATRICES = tuple(np.random.default_rng(0).normal(size=(2, 4, 1, 11, 11)))
NEEDS_UNIFORM = {"fig1", "fig2"}
NEEDS_LAYERS = {"fig5", "fig7"}


def titles(figure: Figure) -> list[str]:
    return [axes.get_title() for axes in figure.get_axes()]


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("size", ["paper", "laptop", "smoke", "smallest"])
def test_a_figure_adapts_to_the_preset(preset, size, name):
    records, table = preset(size)
    empty = {"smoke": {"fig3"}, "smallest": NEEDS_UNIFORM | NEEDS_LAYERS}.get(size, set())
    if name in empty:
        with pytest.raises(NothingToShowError, match=f"figure {name[-1]} needs"):
            draw(name, records, table=table, matrices=MATRICES)
    else:
        figure = draw(name, records, table=table, matrices=MATRICES)
        # The layout warns, and a warning is an error, where panels do not fit.
        figure.draw_without_rendering()
        assert figure.get_suptitle()


def test_figure_1_has_a_panel_for_each_uniform_noise(preset):
    records, table = preset("paper")
    assert titles(fig1(records, table)) == ["σ = 0", *(f"σ ~ U(0, {top})" for top in range(1, 8))]


def test_figure_2_names_the_deepest_common_depth(preset):
    records, _ = preset("paper")
    shallow = [r for r in records if r["noise"] == "sigma_5" or (r["layers"] or 0) <= 7]
    assert "7 layers (top)" in fig2(shallow).get_suptitle()
    assert "5 layers (top)" in fig2(preset("laptop")[0]).get_suptitle()


def test_figure_7_has_a_row_a_kind_and_a_column_a_depth(preset):
    figure = fig7(preset("paper")[0])
    assert len(figure.get_axes()) == 3 * 7
    assert titles(figure)[:7] == [f"{depth} layers" for depth in range(2, 9)]
    assert all(axes.get_ylim() == (0, 1) for axes in figure.get_axes())


def test_lines_show_the_best_seed(preset):
    records, _ = preset("laptop")
    curves, noise = Curves(records), parse_noise("sigma_5")
    averages = curves.averages("full", 5, noise)
    assert len(averages) == 2
    best = curves.best_seed("full", 5, noise)
    assert curves.best("full", 5, noise) == min(averages.values()) == averages[best]
    profile = curves.profile("full", 5, noise)
    own = [
        r["adjusted_loss"]
        for r in records
        if r["seed"] == best
        and r["sigma"] is not None
        and (r["model"], r["layers"], r["noise"], r["read_after"]) == ("full", 5, "sigma_5", 5)
    ]
    assert profile is not None
    assert profile.y.tolist() == own


def test_of_five_seeds_the_outer_two_are_outside_the_bars():
    curve = Curve.of({1.0: [5, float("nan"), 1, 2, 3], 0.0: [7]})
    assert curve is not None
    assert curve.x.tolist() == [0, 1]
    assert curve.y.tolist() == [7, 3]
    assert curve.low.tolist() == [7, 2]
    assert curve.high.tolist() == [7, 5]


def test_error_bars_hold_the_middle_half_of_the_seeds(preset):
    records, _ = preset("laptop")
    curve = Curves(records).by_layer("full", 3, parse_noise("sigma_5"))
    assert curve is not None
    assert curve.x.tolist() == [0, 1, 2, 3]
    values = sorted(Curves(records).averages("full", 3, parse_noise("sigma_5"), 2).values())
    middle = values[(len(values) - 1) // 2]
    assert (curve.low[2], curve.y[2], curve.high[2]) == (values[0], middle, values[-1])


def test_a_member_without_a_finite_loss_is_drawn_outside_and_not_left_out(preset):
    records, table = preset("laptop")
    broken = [{**r, "adjusted_loss": None, "loss": None} if r["seed"] == 1 else r for r in records]
    for name in FIGURES:
        draw(name, broken, table=table, matrices=MATRICES).draw_without_rendering()
    curves, noise = Curves(broken), parse_noise("sigma_5")
    assert curves.best_seed("diag", 2, noise) == 0
    line = curves.by_layer("diag", 2, noise)
    assert line is not None
    assert set(line.high) == {EXPLODED}
    assert max(line.low) < 100
    figure = draw("fig5", broken, table=table, matrices=MATRICES)
    assert figure.axes[0].get_ylim()[1] < 1000


def test_single_noise_figures_take_the_nearest_to_u_0_5(preset):
    records = [{**r, "noise": "sigma_4"} for r in preset("smoke")[0]]
    assert "U(0, 4)" in fig5(records).get_suptitle()


def test_figure_4_stacks_heads_and_refuses_other_shapes():
    P = np.ones((3, 2, 5, 5))
    titles_of = titles(fig4(P, P))
    assert "$Q^{0, 0}$" in titles_of
    assert "$P^{2, 1}$" in titles_of
    with pytest.raises(ValueError, match=r"shape \[L, H, D, D\], got P \(3, 2, 5, 4\)"):
        fig4(P[..., :4], P)


def test_an_unknown_figure_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"must be one of fig1, .*fig7, got 'fig8'"):
        draw("fig8", [])


def test_saving_twice_gives_the_same_bytes(preset, tmp_path):
    records, table = preset("smoke")
    pictures = [save(fig1(records, table), tmp_path / name, "fig1") for name in "ab"]
    for kind in ("png", "pdf"):
        one, other = ((tmp_path / name / f"fig1.{kind}").read_bytes() for name in "ab")
        assert one == other
        assert b"CreationDate" not in one
        assert kind == "pdf" or one == pictures[0] == pictures[1]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["fig1.pdf", "fig1.png"]


def test_drawing_leaves_the_settings_of_matplotlib_alone(preset):
    import matplotlib

    before = dict(matplotlib.rcParams)
    render(fig5(preset("smoke")[0]))
    assert dict(matplotlib.rcParams) == before


def test_a_line_reaches_the_edge_of_its_panel():
    curve = Curve.of({x: [x] for x in (0.0, 0.4, 0.8, 1.2)})
    assert curve is not None
    assert curve.until(1.0).x.tolist() == [0, 0.4, 0.8, 1.2]
    assert curve.until(0.8).x.tolist() == [0, 0.4, 0.8]
    assert curve.until(9.0).x.tolist() == curve.x.tolist()
