"""Hypothesis draws the same examples in every run and does not time them."""

import jaxtyping
import pytest
from hypothesis import settings

settings.register_profile("rankone", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("rankone")


@pytest.fixture
def unchecked(monkeypatch):
    """No checks of annotations: what a user sees who gives the wrong thing."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
