"""Whole networks built of layers."""

from rankone.models.encoder import Encoder, EncoderConfig

__all__ = ["Encoder", "EncoderConfig"]
