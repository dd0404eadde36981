"""The schema says what the routes do, and no request made from it is answered with a 5xx."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.builders import capacity
from tests.fakes import FakeDevice
from tests.server.letters import serving
from tests.waiting import TIMEOUT_S


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(
        tmp_path_factory.mktemp("model"),
        FakeDevice(capacity=capacity(max_sequence_tokens=40)),
        adapters=("pirate",),
        has_grammars=True,
    ) as client:
        yield client


@pytest.fixture(scope="module")
def schema(client) -> dict[str, Any]:
    return client.get("/openapi.json").json()


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(reference := node.get("$ref"), str):
            yield reference
        for child in node.values():
            yield from references(child)
    elif isinstance(node, list):
        for child in node:
            yield from references(child)


def test_every_reference_leads_somewhere(schema):
    names = {reference.removeprefix("#/components/schemas/") for reference in references(schema)}

    assert names
    assert names <= schema["components"]["schemas"].keys()


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "messages"),
        ("/v1/tokenize", "prompt"),
        ("/v1/detokenize", "tokens"),
    ],
)
def test_a_route_shows_its_body_and_its_answers(schema, path, field):
    operation = schema["paths"][path]["post"]

    assert field in operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"200", "4XX", "5XX"} <= operation["responses"].keys()
    assert "422" not in operation["responses"]


def test_errors_are_described_as_the_json_that_they_are_also_of_routes_that_answer_with_text(schema):
    operations = [operation for path in schema["paths"].values() for operation in path.values()]
    errors = [operation["responses"][kind] for operation in operations for kind in ("4XX", "5XX")]

    assert {tuple(error["content"]) for error in errors} == {("application/json",)}
    assert {error["content"]["application/json"]["schema"]["$ref"] for error in errors} == {
        "#/components/schemas/ErrorBody"
    }


def test_the_page_shows_every_route_and_field_and_needs_nothing_from_elsewhere(client, schema):
    response = client.get("/docs")
    page = response.text

    for path, operations in schema["paths"].items():
        for method in operations:
            assert f"<code>{method.upper()} {path}</code>" in page
    assert "<b><code>messages</code></b>" in page
    assert "<code>top_k</code>" in page
    assert set(re.findall(r'href="#(\w+)"', page)) <= set(re.findall(r'id="(\w+)"', page))
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert not re.search(r"https?://|<script|src=", page)


@pytest.mark.long("what a schema forbids and what it allows, which other tests send by hand")
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_nothing_made_from_the_schema_is_answered_with_a_5xx(client, schema, mode):
    asked: set[str] = set()
    for found in schemathesis.openapi.from_dict(schema).get_all_operations():
        operation = found.ok()

        @settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def every_answer_is_our_own(case: schemathesis.Case) -> None:
            asked.add(case.path)
            response = case.call(base_url=str(client.base_url), timeout=TIMEOUT_S)
            assert response.status_code < 500, f"{case.as_curl_command()}: {response.text}"

        # An operation without parameters cannot be asked wrongly, and one whose stream has no end is tested elsewhere.
        if not operation.path.startswith("/dashboard"):
            with suppress(Unsatisfiable):
                every_answer_is_our_own()

    with_a_body = {
        path
        for path, operations in schema["paths"].items()
        if any("requestBody" in operation for operation in operations.values())
    }
    assert len(with_a_body) > 4
    assert with_a_body <= asked
