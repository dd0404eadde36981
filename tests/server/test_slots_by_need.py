"""What clients and operators see of slots that were made for the adapters at the start."""

from __future__ import annotations

from functools import partial

import httpx

from rota.llm.config import build_device, engine_config, first_adapters, locate_model, with_first
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.text.tokenizer import Tokenizer
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.server.applications import made_app
from tests.server.engines import REPLICAS, engines
from tests.server.running import running
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S


def test_a_later_adapter_of_a_larger_rank_is_refused_with_the_flag_that_helps(tmp_path):
    folder = write_byte_tokenizer(tmp_path / "tiny")
    model = make_tiny_model(folder, "smollm2")
    paths = {name: str(make_adapter(tmp_path / name, model, r=rank)) for name, rank in (("a", 8), ("b", 4), ("c", 12))}
    paths["dora"] = str(make_adapter(tmp_path / "dora", model, use_dora=True))
    options = {"device": "cpu", "dtype": "float32", "kv_blocks": 64, "max_running_requests": 4}
    config = locate_model(engine_config({"model_path": str(folder), "lora_paths": [paths["a"]], **options}, quiet=True))
    config = with_first(config, first_adapters(config))
    registry = Registry("tiny", str(folder))
    first = [registry.add(entry) for entry in first_adapters(config)]
    service = EngineClient(engines(partial(build_device, config), config), first)
    with (
        running(made_app(service, Tokenizer(folder), registry)) as url,
        httpx.Client(base_url=url) as client,
    ):
        service.wait_until_ready(TIMEOUT_S)
        loaded, refused = (
            client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": paths[name]}) for name in "bc"
        )
        info = client.get("/server_info").json()
        client.put("/v1/adapters/dora", json={"path": paths["dora"]}).raise_for_status()
        for _ in range(REPLICAS):  # each grows with its first request for it
            client.post("/v1/completions", json={"model": "dora", "prompt": "a", "max_tokens": 1}).raise_for_status()
        grown = client.get("/server_info").json()

    assert loaded.status_code == 200
    assert refused.status_code == 400
    assert "rank 12, over the limit of 8 that slots were made for; start the server with --max-lora-rank 12" in (
        refused.text
    )
    assert sorted(info["loaded_adapters"]) == ["a", "b"]
    assert info["slots"] == {
        "count": 8,
        "from": "1 adapter at the start",
        "rank": 8,
        "rank_from": "the largest at the start",
        "pages": 0,
        "matrices": 0,
        "bytes": info["lora_memory_bytes"],
        "annexed": [],
    }
    assert grown["slots"]["bytes"] == grown["lora_memory_bytes"] > info["lora_memory_bytes"], "what slots take now"
    assert max(state["slot_bytes"] for state in grown["internal_states"]) == grown["lora_memory_bytes"]
