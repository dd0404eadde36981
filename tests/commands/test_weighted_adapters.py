"""Adapters of several weights on one slot, in a whole server of the built-in model: every request is answered."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import rota
from tests.processes import started
from tests.waiting import line_of

BUILT_IN = Path(rota.__file__).parent / "builtin_adapters"
WEIGHTS = {"pirate": 1, "haiku": 2, "french": 4, "json": 1, "bullets": 2}
FLAGS = ["--max-loras-per-batch", "1", "--max-running-requests", "2", "--max-loaded-loras", "2"]


@pytest.mark.long("forty answers of the built-in model, whose adapters are read again and again")
def test_forty_requests_of_five_adapters_on_one_slot_are_all_answered():
    """Two were, and then `rotate` withheld every token."""
    paths = [
        json.dumps({"lora_name": f"my-{name}", "lora_path": str(BUILT_IN / name), "weight": weight})
        for name, weight in WEIGHTS.items()
    ]
    command = [sys.executable, "-m", "rota", "serve", "--port", "0", "--quiet", *FLAGS, "--chunked-prefill-size", "64"]
    with started([*command, "--lora-paths", *paths]) as server, ThreadPoolExecutor(40) as clients:
        url = line_of(server, "Rota serves").split()[-1]

        def ask(number: int) -> int:
            body = {"model": f"my-{[*WEIGHTS][number % 5]}", "prompt": f"Question {number}:", "max_tokens": 8}
            return httpx.post(f"{url}/v1/completions", json=body).status_code

        assert [*clients.map(ask, range(40))] == [200] * 40
