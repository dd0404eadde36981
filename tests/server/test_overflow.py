"""A prompt that is longer than the context is refused in words that clients know, in every dialect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.letters import CONTEXT, letters_device, serving

LONG = "x" * CONTEXT
CHAT = {"messages": [{"role": "user", "content": LONG}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": LONG},
    "/v1/messages": CHAT | {"max_tokens": 1},
    "/v1/embeddings": {"input": LONG},
    "/api/chat": CHAT,
    "/api/generate": {"prompt": LONG},
    "/generate": {"text": LONG},
}
# What clients look for: a code, or a part of the message. LangChain and litellm ask a model with a larger context then.
OPENAI, LITELLM, ANTHROPIC = (
    "context_length_exceeded",
    "This model's maximum context length is 200 tokens",
    "prompt is too long",
)


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), letters_device()) as client:
        yield client


@pytest.mark.parametrize("path", BODIES)
def test_an_overflow_is_400_in_the_words_that_clients_look_for(client, path):
    answer = client.post(path, json=BODIES[path])

    assert answer.status_code == 400
    assert LITELLM in answer.text
    assert ANTHROPIC in answer.text
    assert re.search(r"\d+ tokens > 199 maximum", answer.text)


@pytest.mark.parametrize("path", sorted(BODIES.keys() - {"/v1/messages", "/api/chat", "/api/generate"}))
def test_openais_error_has_openais_code(client, path):
    assert client.post(path, json=BODIES[path]).json()["error"]["code"] == OPENAI


def test_anthropics_error_has_anthropics_type(client):
    error = client.post("/v1/messages", json=BODIES["/v1/messages"]).json()["error"]

    assert (error["type"], ANTHROPIC in error["message"]) == ("invalid_request_error", True)


def test_a_body_that_is_too_large_stays_413(client):
    assert client.post("/v1/chat/completions", content=b" " * (17 << 20)).status_code == 413
