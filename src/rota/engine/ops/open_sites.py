"""The sites whose products stay open: the operation that follows adds the adapters' part.

    gate_up    silu · up                       o, down    residual and norm (a program reads all of a row's B)
    qkv        rotation and KV write

On an H200 all four save 0.4 ms of a step of 64 with six adapters; of a step of 384, o and down save nothing
(`benchmarks/open_sites.py`, decision 0023). In steps with a prompt gate_up alone stays open: beside a product of 2,048
tokens that is one time less of writing and reading 117 MB. Steps without adapters are not concerned.
"""

from __future__ import annotations

from collections.abc import Mapping

# By site, the most tokens of a step that only decodes.
OPEN_SITES: Mapping[str, int] = {"gate_up": 512, "qkv": 512, "o": 128, "down": 128}
# In steps with a prompt, of any number of tokens.
OPEN_BESIDE_PROMPTS = frozenset({"gate_up"})
