"""Names that vLLM and SGLang have, each in one version: flags, metrics and routes, as their own sources have them."""

from __future__ import annotations

import json
from pathlib import Path

# Lists are wrapped as lines of words.
_FOUND = json.loads(Path(__file__).with_name("peers.json").read_text("utf-8"))
VLLM, SGLANG = (
    {kind: frozenset(" ".join(lines).split()) for kind, lines in _FOUND[server].items()}
    for server in ("vllm 0.32.0", "sglang 0.5.23")
)
