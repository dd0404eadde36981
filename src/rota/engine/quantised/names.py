"""The names of a file of groups and of its tensors, apart from the code that reads it and imports torch."""

from __future__ import annotations

GROUPS_FILE = "groups.safetensors"
CODES, SCALES, MINIMA = ".codes", ".scales", ".minima"
