"""What a file of groups is called, and its tensors: apart from the code that reads it, which takes torch to load."""

from __future__ import annotations

GROUPS_FILE = "groups.safetensors"
CODES, SCALES, MINIMA = ".codes", ".scales", ".minima"
