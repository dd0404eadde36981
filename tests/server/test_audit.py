"""Every act that changes the server for others leaves a line: who, what, and how it ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rota.observe.logs import JsonLines, TextLines
from rota.server.access.keys import Key, KeyRing, digest_of
from tests.fakes import FakeDevice
from tests.server.letters import Gate, letters_device, serving

OPERATOR = Key("operator")
ACME = Key("acme", frozenset({"acme-*", "pirate"}), may_operate=False, adapter_root="/a")
MUTE = Key("mute", may_load=False, may_operate=False)
RING = KeyRing({digest_of(f"sk-{key.name}"): key for key in (OPERATOR, ACME, MUTE)})


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), letters_device(), keys=RING, adapters=("pirate",)) as client:
        yield client


@pytest.fixture
def client(server, caplog) -> httpx.Client:
    caplog.set_level(logging.INFO, "rota.audit")
    return server


def act(client: httpx.Client, path: str, key: str = "acme", **body: Any) -> httpx.Response:
    return client.post(path, json=body, headers={"x-api-key": f"sk-{key}"})


def lines(caplog) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.name == "rota.audit"]


WHO = {"key": "acme", "client": "127.0.0.1"}


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_a_load_and_an_unload_have_their_lines(client, caplog, prefix):
    act(client, f"{prefix}/load_lora_adapter", lora_name="acme-owl", lora_path="owl")
    act(client, f"{prefix}/unload_lora_adapter", lora_name="acme-owl")

    assert lines(caplog) == [
        {"action": "load", **WHO, "adapter": "acme-owl", "path": "owl", "outcome": "ok"},
        {"action": "unload", **WHO, "adapter": "acme-owl", "outcome": "ok"},
    ]


@pytest.mark.parametrize("prefix", ["/v1", ""])
@pytest.mark.parametrize(
    ("key", "name", "path", "reason"),
    [
        ("acme", "acme-owl", "broken", "broken is broken."),
        ("acme", "beta-owl", "owl", "Key 'acme' may not load or unload 'beta-owl'"),
        ("acme", "pirate", "owl", "it is not this key's own."),
        ("mute", "owl", "owl", "that needs may_load."),
        ("acme", "acme-" + "x" * 300, "owl", "at most 200 characters"),
    ],
)
def test_a_load_that_is_refused_has_its_line_with_the_reason(client, caplog, prefix, key, name, path, reason):
    refused = act(client, f"{prefix}/load_lora_adapter", key, lora_name=name, lora_path=path)
    (line,) = lines(caplog)

    assert refused.status_code in (400, 403)
    assert (line["action"], line["key"], line["adapter"]) == ("load", key, name[:200])
    assert reason in line["outcome"]


@pytest.mark.parametrize("prefix", ["/v1", ""])
@pytest.mark.parametrize(
    ("name", "reason"), [("acme-cat", "No adapter named 'acme-cat'"), ("pirate", "not this key's")]
)
def test_an_unload_that_is_refused_has_its_line_with_the_reason(client, caplog, prefix, name, reason):
    act(client, f"{prefix}/unload_lora_adapter", lora_name=name)
    (line,) = lines(caplog)

    assert (line["action"], line["adapter"], reason in line["outcome"]) == ("unload", name, True)


def test_a_flush_has_its_line_for_who_may_and_for_who_may_not(client, caplog):
    act(client, "/flush_cache", "operator")
    act(client, "/flush_cache", "acme")

    done, refused = lines(caplog)
    assert done == {"action": "flush_cache", "key": "operator", "client": "127.0.0.1", "blocks": 0, "outcome": "ok"}
    assert (refused["key"], "may_operate" in refused["outcome"]) == ("acme", True)


def test_an_abort_has_its_line_with_how_many_calls_it_ended(tmp_path, caplog):
    caplog.set_level(logging.INFO, "rota.audit")
    gate = Gate()
    body = {"model": "pirate", "prompt": "abc", "max_tokens": 60, "stream": True}
    headers = {"x-api-key": "sk-acme", "X-Request-Id": "mine"}
    with (
        serving(tmp_path, FakeDevice(next_token=gate), keys=RING, adapters=("pirate",)) as client,
        client.stream("POST", "/v1/completions", json=body, headers=headers) as stream,
    ):
        answer = stream.iter_lines()
        next(answer)
        act(client, "/abort_request", rid="mine")
        act(client, "/abort_request", rid="nothing")
        act(client, "/abort_request", "operator", abort_all=True)
        gate.set()

    assert lines(caplog) == [
        {"action": "abort", **WHO, "request": "mine", "aborted": 1, "outcome": "ok"},
        {"action": "abort", **WHO, "request": "nothing", "aborted": 0, "outcome": "ok"},
        {"action": "abort", **WHO, "key": "operator", "request": "all", "aborted": 1, "outcome": "ok"},
    ]


def test_a_client_without_a_key_writes_no_audit_line(client, caplog):
    client.post("/v1/load_lora_adapter", json={"lora_name": "owl", "lora_path": "owl"})

    assert lines(caplog) == []


def test_a_line_is_in_the_servers_log_format_and_holds_no_second_line(client, caplog):
    act(client, "/v1/load_lora_adapter", lora_name="acme-owl", lora_path="a\nINFO audit key=operator")
    (record,) = [record for record in caplog.records if record.name == "rota.audit"]

    assert 'audit action=load key=acme client=127.0.0.1 adapter=acme-owl path="a\\nINFO' in TextLines().format(record)
    assert "\n" not in TextLines().format(record) + JsonLines().format(record)
    assert '"action":"load","key":"acme"' in JsonLines().format(record)
    assert "sk-" not in JsonLines().format(record)
    act(client, "/v1/unload_lora_adapter", lora_name="acme-owl")
