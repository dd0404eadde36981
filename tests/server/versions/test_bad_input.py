"""What is wrong with a version or a route is told in a sentence, and the name serves on; routed answers are PEFT's."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from rota.core.config import ServerConfig
from rota.core.lora_paths import LoraPath
from rota.llm.config import build_device, engine_config
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.server.access.access import Access
from rota.server.access.keys import Key, KeyRing, digest_of
from rota.server.answers.respond import VERSION_HEADER
from rota.text.tokenizer import Tokenizer
from tests.server.applications import made_app, running
from tests.server.engines import engines
from tests.server.letters import error_of
from tests.server.storm.library import Library, Part, make_library
from tests.server.versions.serving import CONFIG, send, weights
from tests.waiting import TIMEOUT_S, until

OPERATOR, ACME = Key("operator"), Key("acme", frozenset({"legal", "acme-*"}), may_operate=False, adapter_root="/a")
RING = KeyRing({digest_of(key.name): key for key in (OPERATOR, ACME)})
PROMPT = (5, 9, 77, 130, 4)
# Of the name that everything bad happens to.
KINDS = {"1": "a", "2": "b"}
ROUTE = {"targets": {"legal@1": 0.5, "legal@2": 0.5}, "rollback": "legal@1"}
OPTIONS = {"device": "cpu", "dtype": "float32", "kv_blocks": 64, "max_running_requests": 4, "max_lora_rank": 4}


class Stage:
    """A server with a tiny model; "legal" has two versions and a route between them, "poet" has one."""

    def __init__(self, client: httpx.Client, library: Library, spools: Path) -> None:
        self.client, self.library, self._spools = client, library, spools

    def ask(self, model: str = "legal", **fields: Any) -> tuple[str, list[int]]:
        """The version that answers, and its tokens."""
        asked = {
            "prompt": list(PROMPT),
            "temperature": 0,
            "max_tokens": 4,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = self.client.post("/v1/completions", json={**asked, "model": model, **fields}).raise_for_status()
        return answer.headers[VERSION_HEADER], answer.json()["choices"][0]["token_ids"]

    def is_pefts(self, version: str, tokens: list[int]) -> bool:
        return self.library.answer([Part(KINDS[version], 0)], PROMPT, tokens) == tokens

    def picture(self) -> tuple[Any, Any, list[str]]:
        """All that a refused call must leave as it was."""
        listed = self.client.get("/v1/adapters").json()["data"]
        routes = [{key: one[key] for key in ROUTE} for one in self.client.get("/v1/routes").json()["data"]]
        files = [name for _, _, names in os.walk(self._spools) for name in names]
        return listed, routes, files

    def put(self, name: str, body: dict[str, Any], key: Key = OPERATOR) -> httpx.Response:
        return self.client.put(f"/v1/adapters/{name}", json=body, headers={"x-api-key": key.name})


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    library, spools = make_library(tmp_path_factory.mktemp("library")), tmp_path_factory.mktemp("spools")
    config = engine_config({"model_path": str(library.model_folder), **OPTIONS}, quiet=True)
    registry = Registry("tiny", str(library.model_folder))
    first = [
        registry.add(LoraPath(name=name, path=str(library.path(kind))))
        for name, kind in (("legal", "a"), ("poet", "c"))
    ]
    service = EngineClient(engines(partial(build_device, config), config), first)
    server = ServerConfig(max_body_mb=1, max_adapter_body_mb=1)
    app = made_app(service, Tokenizer(library.model_folder), registry, access=Access(registry, RING), config=server)
    before, tempfile.tempdir = tempfile.tempdir, str(spools)
    try:
        with running(app) as url, httpx.Client(base_url=url) as client:
            client.headers["x-api-key"] = OPERATOR.name
            service.wait_until_ready(TIMEOUT_S)
            stage = Stage(client, library, spools)
            stage.put("legal", {"path": str(library.path("b")), "mode": "stage"}).raise_for_status()
            stage.put("legal/route", ROUTE).raise_for_status()
            for model in ("legal@1", "legal@2", "poet"):
                stage.ask(model)
            # Its size is told once it was read, which may be after the first answer.
            assert until(lambda: all(one["bytes"] for name in stage.picture()[0] for one in name["versions"]))
            yield stage
    finally:
        tempfile.tempdir = before


def refused(answer: httpx.Response, status: int, param: str | None, words: str) -> None:
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (status, param), error
    assert words in error["message"], error
    assert error["message"].endswith("."), "it is a sentence"


def served_on(stage: Stage, before: Any) -> None:
    assert until(lambda: stage.picture() == before), "a call that was refused has changed something"
    given = [stage.ask() for _ in range(2)]
    assert {version for version, _ in given} == {"1", "2"}
    assert all(stage.is_pefts(*one) for one in given)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("foreign", "has the shape"),
        ("ranked", "rank 7, over the limit of 4"),
        ("nan", "has values that are NaN or infinite"),
        ("cut", "is truncated or corrupt"),
        ("absent", "There is no adapter folder at "),
    ],
)
def test_a_version_of_a_folder_that_cannot_be_served(stage, kind, words):
    before = stage.picture()
    for mode in ("finish", "switch", "stage"):
        refused(stage.put("legal", {"path": str(stage.library.path(kind)), "mode": mode}), 400, None, words)
    served_on(stage, before)


@pytest.mark.parametrize(
    ("kind", "words"), [("foreign", "has the shape"), ("ranked", "rank 7"), ("nan", "NaN"), ("cut", "truncated")]
)
def test_a_version_in_a_body_that_cannot_be_served(stage, kind, words):
    before = stage.picture()
    answer = send(stage.client, "legal", stage.library.weights(kind), config=stage.library.config(kind))
    refused(answer, 400, None, words)
    assert error_of(answer)["message"].startswith("adapter_"), "no folder is named that the client has not sent"
    served_on(stage, before)


@pytest.mark.parametrize(
    ("body", "query", "status", "param", "words"),
    [
        (b"no weights at all", {"config": CONFIG}, 400, "body", "no safetensors"),
        (
            weights(size=2 << 20),
            {"config": CONFIG},
            413,
            None,
            "larger than 1 MB, the limit set by --max-adapter-body-mb",
        ),
        (weights(), {}, 400, None, "send the config with the weights in the query parameter 'config'"),
        (weights(), {"config": CONFIG, "mode": "jump"}, 400, "mode", "mode"),
    ],
)
def test_a_body_that_is_no_version(stage, body, query, status, param, words):
    before = stage.picture()
    refused(send(stage.client, "legal", body, **query), status, param, words)
    served_on(stage, before)


TOO_MANY = {f"legal@{number}": 1 / 17 for number in range(1, 18)}


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({"targets": {"legal@1": 0.5, "legal@2": 0.4}}, 400, "targets", "must sum to 1, not 0.9."),
        ({"targets": {"legal@1": 1.5, "legal@2": -0.5}}, 400, "targets.legal@1", "between 0 and 1, not 1.5."),
        ({"targets": {}}, 400, "targets", "1 to 16 targets, not 0."),
        ({"targets": TOO_MANY}, 400, "targets", "1 to 16 targets, not 17."),
        ({"targets": {"legal@9": 1}}, 404, "targets.legal@9", "no model or adapter named 'legal@9'"),
        ({"targets": {"owl": 1}}, 404, "targets.owl", "no model or adapter named 'owl'"),
        ({"targets": {"legal@1": 1}, "rollback": "legal@9"}, 404, "rollback", "no model or adapter named 'legal@9'"),
        ({"targets": {"legal@1": 1}, "shadow": "legal@1"}, 400, "shadow", "is one of the targets"),
        ({"targets": {"legal@1": 1}, "sticky": True}, 400, "sticky", "'sticky' is not a field"),
        ({"targets": ["legal@1"]}, 400, "targets", "should be an object."),
        ({}, 400, "targets", "targets"),
    ],
)
def test_a_route_that_cannot_be(stage, body, status, param, words):
    before = stage.picture()
    refused(stage.put("legal/route", body), status, param, words)
    served_on(stage, before)


def test_a_route_to_a_name_that_the_key_may_not_use(stage):
    before = stage.picture()
    sent = {"params": {"config": stage.library.config("a")}, "content": stage.library.weights("a")}
    headers = {"content-type": "application/octet-stream", "x-api-key": ACME.name}
    stage.client.put("/v1/adapters/acme-owl", **sent, headers=headers).raise_for_status()
    for place in ({"targets": {"poet": 1.0}}, {"targets": {"acme-owl": 1.0}, "shadow": "poet"}):
        answer = stage.put("acme-owl/route", place, ACME)
        param = "shadow" if "shadow" in place else "targets.poet"
        refused(answer, 403, param, "Key 'acme' may not use 'poet'")
    refused(stage.put("legal/route", {"targets": {"legal@1": 1.0}}, ACME), 403, "name", "not this key's own")
    stage.client.delete("/v1/adapters/acme-owl").raise_for_status()
    served_on(stage, before)


def test_routes_that_name_each_other_or_themselves_are_followed_once(stage):
    before = stage.picture()
    stage.put("legal/route", {"targets": {"poet": 0.5, "legal": 0.5}}).raise_for_status()
    stage.put("poet/route", {"targets": {"legal": 1.0}, "rollback": "poet"}).raise_for_status()
    body = {"prompt": list(PROMPT), "max_tokens": 1}
    answers = [
        stage.client.post("/v1/completions", json={**body, "model": name}).json()["model"]
        for name in ("legal", "legal", "poet")
    ]
    assert (sorted(answers[:2]), answers[2]) == (["legal", "poet"], "legal")

    stage.client.delete("/v1/adapters/poet/route").raise_for_status()
    stage.put("legal/route", ROUTE).raise_for_status()
    served_on(stage, before)


@pytest.mark.parametrize("is_routed_first", [True, False])
def test_a_name_that_is_routed_and_unloaded_at_once(stage, is_routed_first):
    before = stage.picture()
    route, unload = (
        partial(stage.put, "owl/route", {"targets": {"owl": 0.5, "poet": 0.5}}),
        partial(stage.client.delete, "/v1/adapters/owl"),
    )
    for _ in range(3):
        stage.put("owl", {"path": str(stage.library.path("a"))}).raise_for_status()
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(call) for call in ((route, unload) if is_routed_first else (unload, route))]
            answers = [call.result() for call in calls]
        statuses = [answer.status_code for answer in answers]
        routed, unloaded = statuses if is_routed_first else statuses[::-1]
        assert unloaded == 200
        if routed != 200:
            refused(answers[0 if is_routed_first else 1], 404, "name", "No adapter named 'owl' is loaded")
        assert stage.client.post("/v1/completions", json={"model": "owl", "prompt": "abc"}).status_code == 404
    served_on(stage, before)


@pytest.mark.parametrize("field", ["user", "cache_salt"])
def test_routed_answers_are_pefts_and_an_asker_stays_with_its_version(stage, field):
    by_asker: dict[str, set[str]] = {}
    for number in [*range(8), *range(8)]:
        version, tokens = stage.ask(**{field: f"asker {number}"})
        assert stage.is_pefts(version, tokens)
        by_asker.setdefault(f"asker {number}", set()).add(version)
    assert all(len(versions) == 1 for versions in by_asker.values())
    assert {version for versions in by_asker.values() for version in versions} == {"1", "2"}


def test_a_conversation_stays_with_its_version_and_is_pefts(stage):
    said = {"messages": [{"role": "user", "content": "abc"}], "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    seen = set()
    for number in (0, 1, 2, 3, 0, 1, 2, 3):
        body = {"model": "legal", **said, "return_token_ids": True, "prompt_cache_key": f"talk {number}"}
        answer = stage.client.post("/v1/chat/completions", json=body).raise_for_status()
        version, tokens = answer.headers[VERSION_HEADER], answer.json()["choices"][0]["token_ids"]
        assert stage.library.answer([Part(KINDS[version], 0)], answer.json()["prompt_token_ids"], tokens) == tokens
        seen.add((number, version))
    assert len(seen) == 4
    assert {version for _, version in seen} == {"1", "2"}


def test_a_stream_that_is_routed_is_pefts_with_the_version_it_names(stage):
    body = {
        "model": "legal",
        "prompt": list(PROMPT),
        "temperature": 0,
        "max_tokens": 8,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    seen = set()
    for _ in range(2):
        answer = stage.client.post("/v1/completions", json=body)
        lines = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        tokens = [token for line in lines for choice in line["choices"] for token in choice["token_ids"]]
        assert stage.is_pefts(answer.headers[VERSION_HEADER], tokens)
        seen.add(answer.headers[VERSION_HEADER])
    assert seen == {"1", "2"}
