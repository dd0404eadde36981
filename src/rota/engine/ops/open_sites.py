"""The sites whose products stay open in decode steps: the operation that follows adds the adapters' part.

    gate_up    silu · up                       o, down    residual and norm (a program reads all of a row's B)
    qkv        rotation and KV write

A site is listed once a run on a GPU has shown a gain: `benchmarks/open_sites.py` measures all of them, and decision
0023 says what is expected. Steps without adapters, and steps with a prompt, are not concerned.
"""

from __future__ import annotations

from collections.abc import Mapping

# By site, the most tokens of a step.
OPEN_SITES: Mapping[str, int] = {}
