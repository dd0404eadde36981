"""A real model with real adapters answers over HTTP as it does offline, each adapter in its own way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest

from rota import LLM, SamplingParams
from rota.core.lora_paths import LoraPath
from rota.llm.config import build_device, engine_config
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.text.tokenizer import Tokenizer
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.server.applications import made_app, running
from tests.server.engines import engines
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S

PROMPT = "once upon a time"
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)


def test_adapters_answer_over_http_as_they_do_offline(tmp_path):
    folder = write_byte_tokenizer(tmp_path / "tiny")
    model = make_tiny_model(folder, "smollm2")
    paths = {name: str(make_adapter(tmp_path / name, model, seed)) for seed, name in enumerate(("pirate", "poet"))}
    options = {"device": "cpu", "dtype": "float32", "kv_blocks": 64, "max_running_requests": 4}
    offline = LLM(folder, adapters=paths, quiet=True, **options).generate(
        [PROMPT] * 3, replace(GREEDY, prompt_logprobs=0), adapter=[None, "pirate", "poet"]
    )

    config = engine_config({"model_path": str(folder), **options}, quiet=True)
    registry = Registry("tiny", str(folder))
    service = EngineClient(
        engines(partial(build_device, config), config),
        [registry.add(LoraPath(name="pirate", path=paths["pirate"]))],
    )
    with (
        running(made_app(service, Tokenizer(folder), registry)) as url,
        httpx.Client(base_url=url) as client,
        ThreadPoolExecutor(3) as threads,
    ):
        service.wait_until_ready(TIMEOUT_S)
        loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "poet", "lora_path": paths["poet"]})
        missing = client.post("/v1/load_lora_adapter", json={"lora_name": "owl", "lora_path": str(tmp_path / "owl")})
        wanted = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True}

        def ask(name: str, **fields: Any) -> dict[str, Any]:
            return client.post("/v1/completions", json={**wanted, "model": name, **fields}).json()["choices"][0]

        names = ("tiny", "pirate", "tiny:poet")
        answers = list(threads.map(ask, names))
        echoes = list(threads.map(partial(ask, echo=True, logprobs=1, max_tokens=0), names))

    assert loaded.status_code == 200
    assert (missing.status_code, "There is no adapter folder" in missing.text) == (400, True)
    texts = [answer["text"] for answer in answers]
    assert texts == [completion.text for completion in offline]
    assert len(set(texts)) == 3
    assert {echo["text"] for echo in echoes} == {PROMPT}
    for echo, completion in zip(echoes, offline, strict=True):
        first, *scores = echo["logprobs"]["token_logprobs"]
        assert first is None
        assert scores == pytest.approx([entry.chosen for entry in completion.prompt_logprobs], abs=1e-4)
