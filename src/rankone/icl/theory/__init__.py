"""What the layers of a linear transformer compute, as mathematics that runs.

implicit       the linear model that every layer keeps (Lemma 4.3), and for DIAG the momentum form
               of its steps (Lemma 4.4)
constructions  weights that are known to compute something: gradient descent, GD++ by a schedule,
               two layers that tell two noises apart, the best single layer
floor          what GD++ can never beat
"""

from rankone.icl.theory.constructions import (
    best_single_layer,
    gradient_descent,
    least_squares_schedule,
    preconditioned_descent,
    two_noise_ridge,
)
from rankone.icl.theory.floor import Floor, gdpp_floor
from rankone.icl.theory.implicit import (
    ImplicitModel,
    Momentum,
    implicit_models,
    momentum_form,
    momentum_step,
)

__all__ = [
    "Floor",
    "ImplicitModel",
    "Momentum",
    "best_single_layer",
    "gdpp_floor",
    "gradient_descent",
    "implicit_models",
    "least_squares_schedule",
    "momentum_form",
    "momentum_step",
    "preconditioned_descent",
    "two_noise_ridge",
]
