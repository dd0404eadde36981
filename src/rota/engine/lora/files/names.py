"""Names of modules as PEFT matches them, and the modules at the model's ends."""

from __future__ import annotations

import re
from collections.abc import Sequence

EVERY_LINEAR = "all-linear"
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
ENDS = (EMBEDDING, HEAD)


def is_named(targets: Sequence[str] | str, module: str) -> bool:
    """As in PEFT: a string is a regular expression for the whole name, a list has names or ends of names."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return module in targets or any(module.endswith(f".{target}") for target in targets)
