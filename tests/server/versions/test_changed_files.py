"""Files that changed since they were loaded are refused, or become a new version if the server was told so."""

from __future__ import annotations

import logging

import httpx

from rota.core.adapter import Adapter, changed_since
from rota.core.config import ServerConfig
from rota.core.errors import FaultCode
from rota.core.messages import AdapterFailed, AdapterFetched, Message
from rota.core.plan import StepPlan
from rota.server.access.keys import Key, KeyRing, digest_of
from tests.builders import capacity
from tests.fakes import FakeDevice, FakeTicket
from tests.server.letters import CONTEXT, error_of, serving, speaks
from tests.waiting import until

ACME = Key("acme", frozenset({"acme-*"}), may_operate=False, adapter_root="/adapters/acme")
RING = KeyRing({digest_of(key.name): key for key in (ACME, Key("operator"))})
CHANGED = "'acme-owl' changed since version 1 was loaded; PUT it again."


class ChangingDevice(FakeDevice):
    """Reads version 1 once. Its files are others when it is to be copied into a slot."""

    def fetch(self, adapter: Adapter) -> Message:
        self.adapters = {**getattr(self, "adapters", {}), adapter.adapter_id: adapter}
        return AdapterFetched(adapter_id=adapter.adapter_id, at=self.now(), seals=(str(adapter.version),))

    def submit(self, plan: StepPlan) -> FakeTicket:
        ticket = super().submit(plan)
        for load in plan.loads:
            adapter = self.adapters[load.adapter_id]
            if adapter.version == 1:
                reason, code = changed_since(adapter), FaultCode.ADAPTER_CHANGED
                self._post(AdapterFailed(adapter_id=load.adapter_id, at=self.now(), reason=reason, code=code))
        return ticket


def device() -> ChangingDevice:
    return ChangingDevice(next_token=speaks, capacity=capacity(max_sequence_tokens=CONTEXT))


def ask(client: httpx.Client) -> httpx.Response:
    body = {"model": "acme-owl", "prompt": "ab", "max_tokens": 2}
    return client.post("/v1/completions", json=body, headers={"x-api-key": "acme"})


def load(client: httpx.Client) -> dict[str, object]:
    return client.put("/v1/adapters/acme-owl", json={"path": "owl"}, headers={"x-api-key": "acme"}).json()


def states(client: httpx.Client) -> list[str]:
    listed = client.get("/v1/adapters/acme-owl", headers={"x-api-key": "acme"}).json()
    return [one["state"] for one in listed["versions"]]


def test_a_version_that_changed_is_refused_with_409_until_it_is_put_again(tmp_path):
    with serving(tmp_path, device(), keys=RING) as client:
        load(client)
        first, later = ask(client), ask(client)
        # Once every replica has found it changed.
        assert until(lambda: ask(client).status_code == 409 and states(client) == ["lost"])
        assert load(client)["version"] == 2
        assert ask(client).status_code == 200

    assert [(one.status_code, error_of(one)["code"]) for one in (first, later)] == [(409, "adapter_changed")] * 2
    assert error_of(first)["message"] == CHANGED
    assert CHANGED in error_of(later)["message"]


def test_with_the_flag_it_becomes_a_new_version_of_the_same_owner(tmp_path, caplog):
    caplog.set_level(logging.INFO, "rota.audit")
    with serving(tmp_path, device(), keys=RING, config=ServerConfig(reload_changed=True)) as client:
        load(client)
        assert ask(client).status_code == 409
        assert until(lambda: ask(client).status_code == 200)
        listed = client.get("/v1/adapters/acme-owl", headers={"x-api-key": "operator"}).json()

    assert (listed["version"], listed["owner"]) == (2, "acme")
    *_, line = [record.fields for record in caplog.records if record.name == "rota.audit"]
    assert line == {
        "action": "update",
        "key": "acme",
        "client": "this server",
        "adapter": "acme-owl",
        "path": "owl",
        "reloaded": True,
        "outcome": "ok",
    }
