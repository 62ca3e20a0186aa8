"""What Ahn et al. 2023 print, and what their notebooks show."""

from __future__ import annotations

A_THEOREM3 = (-0.69, -0.43, -1.72)
"""Diagonals of Σ^½ A_l Σ^½, figure 2."""
B_THEOREM4 = (0.90, 0.57)
"""Diagonals of B_0 and B_1, figure 4."""
A_THEOREM4 = (-0.38, -2.40, -9.55)
"""Diagonals of Σ^½ A_l Σ^½, figure 5."""
LBFGS_LOSSES = (6.24e-4, 5.27e-4, 6.09e-4)
"""Last training losses of their L-BFGS notebook, three seeds with one batch of 20,000 each."""
SPIKE = (6000, 0.325, 6.36e-4)
"""In their Adam notebook: an iteration, its loss, and the loss 100 iterations before."""

MULTIPLES: dict[str, dict[str, tuple[float, ...]]] = {
    "theorem3": {"A": A_THEOREM3, "B": ()},
    "theorem4": {"A": A_THEOREM4, "B": B_THEOREM4},
}
"""Family → matrix → multiple of the identity in each layer; 3 layers, n = 20."""
