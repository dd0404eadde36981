"""A server starts with routes between its adapters."""

from __future__ import annotations

import json

import pytest

from rota.core.config import ServerConfig
from rota.core.errors import ConfigError
from rota.core.lora_paths import LoraPath
from rota.runtime.registry import Registry
from rota.server.routes.traffic import first_routes
from tests.server.letters import letters_device, serving

HALF = {"targets": {"legal": 0.5, "new@1": 0.5}, "rollback": "legal", "shadow": "poet"}


def test_routes_of_the_start_send_requests_from_the_first_one_on(tmp_path):
    config = ServerConfig(lora_routes=(f"legal={json.dumps(HALF)}",))
    with serving(tmp_path, letters_device(), config, adapters=("legal", "new", "poet")) as client:
        shown = client.get("/v1/adapters/legal/route").json()
        body = {"model": "legal", "prompt": "abc", "max_tokens": 2}
        answered = {client.post("/v1/completions", json=body).json()["model"] for _ in range(2)}
        client.delete("/v1/adapters/new").raise_for_status()
        after = client.get("/v1/adapters/legal/route").json()

    assert {key: shown[key] for key in HALF} == HALF
    assert answered == {"legal", "new"}
    assert after["rolled_back"]["reason"] == "'new@1' was unloaded."


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["legal"], "'legal' is no route; give NAME=JSON, with the JSON of PUT"),
        (['owl={"targets": {"legal": 1}}'], "'owl' is none of the adapters to start with; they are: legal, new."),
        (['legal={"targets": {"owl": 1}}'], "'owl' is none of the adapters to start with"),
        (['legal={"targets": {"legal@2": 1}}'], "'legal@2' is none of the adapters to start with"),
        (['legal={"targets": {"legal": 0.5}}'], "the route of 'legal' cannot be: The weights in targets must sum to 1"),
        (['legal={"weights": {}}'], "the route of 'legal' cannot be: "),
        (["legal={"], "the route of 'legal' cannot be: "),
        (['legal={"targets": {"new": 1}}'] * 2, "two routes for 'legal'; a name has one"),
    ],
)
def test_a_route_that_cannot_be_is_refused_at_the_start(entries, words):
    registry = Registry("letters", "/models/letters")
    for name in ("legal", "new"):
        registry.add(LoraPath(name=name, path=f"/adapters/{name}"))
    with pytest.raises(ConfigError) as refusal:
        first_routes(entries, registry)
    assert words in str(refusal.value)
