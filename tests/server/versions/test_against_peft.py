"""Every version of a name answers as PEFT does with the weights of that version."""

from __future__ import annotations

import json
from functools import partial

import httpx

from rota.core.lora_paths import LoraPath
from rota.llm.config import build_device, engine_config
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.server.answers.respond import VERSION_HEADER
from rota.text.tokenizer import Tokenizer
from tests.engine.lora.adapter_factory import greedy_answer, load_with_peft, make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.server.applications import made_app
from tests.server.engines import engines
from tests.server.letters import error_of
from tests.server.running import running
from tests.server.versions.serving import put, send
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S

PROMPT, NEW_TOKENS = (5, 9, 77, 130, 4), 16
ASKED = {"prompt": list(PROMPT), "temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}


def test_answers_before_and_after_an_update_are_those_of_peft_with_the_version_they_name(tmp_path):
    folder = write_byte_tokenizer(tmp_path / "tiny")
    model = make_tiny_model(folder, "smollm2")
    paths = {version: make_adapter(tmp_path / str(version), model, seed=version) for version in (1, 2, 3)}
    right = {
        str(version): greedy_answer(load_with_peft(path, model), PROMPT, NEW_TOKENS) for version, path in paths.items()
    }
    options = {"device": "cpu", "dtype": "float32", "kv_blocks": 64, "max_running_requests": 4}
    config = engine_config({"model_path": str(folder), **options}, quiet=True)
    registry = Registry("tiny", str(folder))
    first = registry.add(LoraPath(name="poet", path=str(paths[1])))
    service = EngineClient(engines(partial(build_device, config), config), [first])

    with (
        running(made_app(service, Tokenizer(folder), registry)) as url,
        httpx.Client(base_url=url) as client,
    ):
        service.wait_until_ready(TIMEOUT_S)

        def ask(name: str) -> tuple[str, list[int]]:
            body = {**ASKED, "model": name, "return_token_ids": True}
            answer = client.post("/v1/completions", json=body)
            return answer.headers[VERSION_HEADER], answer.json()["choices"][0]["token_ids"]

        given = [ask("poet")]
        assert put(client, "poet", str(paths[2]), keep_old=True).json()["current"] == 2
        given += [ask("poet"), ask("poet@1"), ask("poet")]
        weights, peft_config = (paths[3] / name for name in ("adapter_model.safetensors", "adapter_config.json"))
        sent = send(client, "poet", weights.read_bytes(), config=peft_config.read_text())
        given += [ask("poet"), ask("poet@1")]
        wide = json.dumps(json.loads(peft_config.read_text()) | {"r": 5})
        refused = send(client, "poet", weights.read_bytes(), config=wide)
        given.append(ask("poet"))
        listed = client.get("/v1/adapters/poet").json()["versions"]

    assert sent.json()["current"] == 3
    assert [version for version, _ in given] == ["1", "2", "1", "2", "3", "1", "3"]
    assert all(tokens == right[version] for version, tokens in given)
    assert len({tuple(tokens) for tokens in right.values()}) == 3
    assert refused.status_code == 400
    assert error_of(refused)["message"].startswith("adapter_model.safetensors: the tensor "), (
        "the client has sent no folder"
    )
    assert all(one["bytes"] > 0 for one in listed)
