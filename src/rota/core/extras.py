"""Extras are what some adapters have besides factors in the layers; a bank has room for those of its first adapters."""

from __future__ import annotations

from enum import IntFlag


class Extra(IntFlag):
    """As a number it travels with the engine's config."""

    NONE = 0
    TRIMS = 1  # a gain and a shift for each output of a site: DoRA and biases
    EMBEDDING = 2  # factors of the embedding
    HEAD = 4  # factors of the head
