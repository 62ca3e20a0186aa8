"""Hypothesis draws the same examples in every run and does not time them."""

from hypothesis import settings

settings.register_profile("rankone", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("rankone")
