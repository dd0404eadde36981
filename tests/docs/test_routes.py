"""Routes take the keys that docs/serving.md says they take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from docs.generate.routes import all_routes
from rota.core.config import EngineConfig
from rota.runtime.in_process import InProcessService
from rota.runtime.registry import Registry
from rota.server.access.access import Right
from rota.server.access.keys import Key
from rota.text.tokenizer import Tokenizer
from tests.dashboard.stage import stage
from tests.fakes import FakeDevice
from tests.server.applications import made_app
from tests.tiny_tokenizer import write_byte_tokenizer

NOTHING: dict[str, Any] = {"may_use_base": False, "may_load": False, "may_operate": False}
KEYS = {
    "bare": Key("bare", frozenset(), **NOTHING),
    "user": Key("user", may_load=False, may_operate=False),
    "loader": Key("loader", frozenset({"parrot"}), **(NOTHING | {"may_load": True, "adapter_root": "/"})),
    "operator": Key("operator", frozenset(), **(NOTHING | {"may_operate": True})),
}
REFUSED = {
    Right.NONE: set(),
    Right.ANY: {"nobody"},
    Right.OWN: {"nobody"},
    Right.MODEL: {"nobody", "bare", "loader", "operator"},
    Right.LOAD: {"nobody", "bare", "user", "operator"},
    Right.OPERATE: {"nobody", "bare", "user", "loader"},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1},
    "/v1/responses": {"input": "abc", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "abc"}]},
    "/api/chat": {"messages": [{"role": "user", "content": "abc"}], "options": {"num_predict": 1}},
    "/v1/embeddings": {"input": "abc"},
    "/api/embed": {"input": "abc"},
    "/api/show": {},
    "/v1/score": {"text_1": "abc", "text_2": "abd"},
    "/v1/rerank": {"query": "abc", "documents": ["abd"]},
    "/generate": {"text": "abc", "sampling_params": {"max_new_tokens": 1}},
    "/v1/tokenize": {"prompt": "abc"},
    "/v1/detokenize": {"tokens": [65]},
    "/abort_request": {"rid": "none-of-mine"},
    "PUT /v1/adapters/{name:path}/route": {"targets": {"parrot": 1.0}},
    **{
        path: {"lora_name": "parrot", "lora_path": "/parrot"}
        for path in all_routes()
        if path.endswith("/load_lora_adapter")
    },
    **{path: {"lora_name": "parrot"} for path in all_routes() if path.endswith("/unload_lora_adapter")},
    "/load_lora_adapter_from_tensors": {"lora_name": "parrot", "config_dict": {}, "serialized_tensors": ""},
    "PUT /v1/adapters/{name:path}": {"path": "/parrot"},
}
LOADED_NAMES = {"{name:path}": "parrot"}
NAMES = {"{name:path}/route": "parrot/route", "{name:path}": "letters", "{name}": "page.js", "{id}": "none-of-mine"}


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[httpx.Client]:
    with (
        stage(tmp_path_factory.mktemp("model"), keys=KEYS) as made,
        httpx.Client(base_url=made.url) as client,
    ):
        yield client


@pytest.mark.parametrize("path", all_routes())
def test_a_route_refuses_whom_its_section_says_it_refuses(client, path):
    route = all_routes()[path]
    for name in route.names:
        refused = set()
        method, asked = name.split(" ")
        for place, value in (NAMES if method in ("GET", "HEAD", "POST") else LOADED_NAMES).items():
            asked = asked.replace(place, value)
        for who in ("nobody", *KEYS):
            headers = {"x-api-key": who} if who in KEYS else {}
            # A stream, because one of them has no end.
            with client.stream(method, asked, headers=headers, json=BODIES.get(path)) as reply:
                if reply.status_code in (401, 403):
                    refused.add(who)
                else:
                    assert reply.status_code < 500
        assert refused == REFUSED[route.right], name


def test_an_application_has_no_route_beside_those_of_the_table(tmp_path):
    """Such a route would be open to everybody."""
    registry, tokenizer = Registry("letters", str(tmp_path)), Tokenizer(write_byte_tokenizer(tmp_path))
    app = made_app(InProcessService(FakeDevice, EngineConfig()), tokenizer, registry)

    found = {f"{method} {route.path}" for route in app.routes for method in route.methods}
    told = {name for route in all_routes().values() for name in route.names}
    assert found - told == {f"{method} {path}" for method in ("GET", "HEAD") for path in ("/docs", "/openapi.json")}
