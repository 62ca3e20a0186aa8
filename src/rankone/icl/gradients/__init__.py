"""Loss and gradient of an ensemble of linear transformers on batches of Gram matrices."""

from rankone.icl.gradients.api import IMPLEMENTATIONS, choose, loss_and_grad

__all__ = ["IMPLEMENTATIONS", "choose", "loss_and_grad"]
