"""`rota serve` starts its engine before it has looked at its adapters, and the engine has slots for them."""

from __future__ import annotations

import sys

import httpx
import pytest

from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.processes import started
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import line_of

FLAGS = ("--port", "0", "--device", "cpu", "--dtype", "float32", "--kv-blocks", "64", "--max-running-requests", "4")


@pytest.mark.long("a server starts")
def test_slots_are_made_for_the_adapters_that_the_server_was_still_looking_at(tmp_path):
    folder = write_byte_tokenizer(tmp_path / "tiny")
    model = make_tiny_model(folder, "smollm2")
    paths = [f"{name}={make_adapter(tmp_path / name, model, r=rank)}" for name, rank in (("small", 4), ("large", 20))]
    command = [sys.executable, "-m", "rota", "serve", str(folder), *FLAGS, "--lora-paths", *paths]
    with started(command) as server:
        url = line_of(server, "Rota serves ").split()[-1]
        info = httpx.get(f"{url}/server_info").json()
        asked = {"model": "large", "prompt": "abc", "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/completions", json=asked)

    assert (info["slots"]["count"], info["slots"]["rank"]) == (8, 24)
    assert answer.status_code == 200
