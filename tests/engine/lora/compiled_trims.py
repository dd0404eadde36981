"""Compiles expand without trims and with them, for a Hopper GPU that need not be here, and prints facts as JSON.

python -m tests.engine.lora.compiled_trims
"""

from __future__ import annotations

import json

from rota.engine.lora.batch import DECODE_TILE
from rota.engine.lora.pages import PAGE_RANK
from rota.engine.lora.triton_ops import DECODE
from tests.engine.lora.compiled import expand, facts

# Llama-8B: two numbers for each of the 43,008 outputs of its 32 layers.
SLOT = 32 * 2 * 43_008

if __name__ == "__main__":
    kinds = [(by_token, page) for by_token in (False, True) for page in (0, PAGE_RANK)]
    print(
        json.dumps([[facts(expand(DECODE, DECODE_TILE, by, page, trim)) for trim in (0, SLOT)] for by, page in kinds])
    )
