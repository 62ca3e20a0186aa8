"""What each figure shows and how it was computed, for readers of the page."""

from __future__ import annotations

from collections.abc import Mapping

_PROFILE = (
    "A profile is the adjusted loss at one fixed standard deviation of the noise: half the mean "
    "squared error minus that of ridge regression which knows the noise. "
)

CAPTIONS: Mapping[str, tuple[str, str]] = {
    "fig1": (
        "Figure 1: adjusted loss against depth",
        "Each panel is one uniform noise distribution, on which the models were both trained and "
        "evaluated. Lines join the best seed of each depth, small dots beside them are the other "
        "seeds, hollow markers the published values. Horizontal lines are the closed forms and, "
        "as the floor, the Bayes-optimal predictor, which the paper does not have. GD++ cannot "
        "fall below ConstRR; the gap between a curve and the floor is what is left to learn.",
    ),
    "fig2": (
        "Figure 2: adjusted loss at fixed noise, uniform training noise",
        _PROFILE + "Grey marks the range seen in training. Above: the deepest models that all "
        "distributions share. Below: one distribution, depth by depth. Lines are best seeds; the "
        "axis ends where the adaptive methods do, so GD++ and ConstRR, which assume one noise "
        "level for every prompt, leave it.",
    ),
    "fig3": (
        "Figure 3: training noise from a set",
        _PROFILE + "Vertical lines mark the values seen in training. First row: loss against "
        "depth as in Figure 1, and the profile of the deepest models shown; below, the profiles "
        "depth by depth. Between and beyond the marked values a model extrapolates. The Bayes "
        "curve is optimal for the set, not for other values.",
    ),
    "fig4": (
        "Figure 4: weights of a FULL model",
        "The matrices Q (top) and P (bottom) of every layer, first layer left. Red is positive, "
        "blue negative, white zero; each matrix has its own scale, since multiplying P and "
        "dividing Q by one number changes nothing. Thin lines part the last row and column, "
        "which belong to y.",
    ),
    "fig5": (
        "Figure 5: the prediction read after each layer",
        "Every layer leaves a prediction in the query token. The curves show its adjusted loss "
        "from none of the layers (the zero predictor) to all of them, a line for each depth; "
        "the median over seeds, bars hold the middle half of them.",
    ),
    "fig6": (
        "Figure 6: loss at fixed noise, not adjusted",
        "Half the mean squared error of the best seeds, of the closed forms, and of the oracle: "
        "ridge regression which knows the noise. The distance to the oracle is the adjusted loss "
        "of the other figures.",
    ),
    "fig7": (
        "Figure 7: profiles of the prediction after each layer",
        _PROFILE + "Rows are kinds of models, columns depths; colours from dark to bright follow "
        "the layers, the thick line is the model's own prediction. Lines are medians over seeds, "
        "bands hold the middle half of them; a band that leaves the picture belongs to seeds which "
        "explode on noise beyond their training. Grey marks the range seen in training.",
    ),
}
"""Figure name → (title, caption)."""
