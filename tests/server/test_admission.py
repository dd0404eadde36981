"""What a key may take, over HTTP: a call is let in with all that it may take, or it takes nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rota.core.config import ServerConfig
from rota.server.access.keys import Key, KeyRing, digest_of
from tests.fakes import FakeDevice
from tests.server.letters import CONTEXT, Gate, error_of, letters_device, serving

CHAT = [{"role": "user", "content": "abc"}]


def keyed(folder: Path, device: FakeDevice | None = None, **limits: Any) -> AbstractContextManager[httpx.Client]:
    """A server whose keys have their names for secrets: a limited one and its neighbour."""
    keys = [Key("acme", **limits), Key("neighbour")]
    ring = KeyRing({digest_of(key.name): key for key in keys})
    config = ServerConfig(stream_keep_alive=0.05)
    return serving(folder, device or letters_device(), config, ring)


def ask(client: httpx.Client, key: str = "acme", route: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return client.post(route, json=fields, headers={"x-api-key": key})


def test_a_key_that_asks_for_far_more_than_its_minute_starts_nothing_and_its_neighbour_is_served(tmp_path):
    device = letters_device()
    with keyed(tmp_path, device, tokens_per_minute=100) as client:
        refused = [ask(client, prompt=["x"] * 150, max_tokens=8000) for _ in range(2)]
        assert [seat for plan in device.plans for seat in plan.seats] == []
        served = ask(client, "neighbour", prompt="abc", max_tokens=3)

    assert [answer.status_code for answer in refused] == [400, 400]
    assert "Retry-After" not in refused[0].headers
    assert error_of(refused[0])["param"] == "max_tokens"
    assert error_of(refused[0])["message"] == (
        f"This call has 150 prompt tokens and may have {150 * (CONTEXT - 1)} output tokens. Key 'acme' may have 100 "
        "tokens a minute, so this call can never be served; lower max_tokens, or send fewer or shorter prompts."
    )
    assert served.status_code == 200


@pytest.mark.parametrize(
    ("limits", "route", "fields", "param", "words"),
    [
        (
            {"tokens_per_minute": 50},
            "/generate",
            {"text": "abc", "sampling_params": {"max_new_tokens": 48}},
            "sampling_params.max_new_tokens",
            "3 prompt tokens and may have 48 output tokens. Key 'acme' may have 50 tokens a minute",
        ),
        (
            {"max_tokens_in_flight": 50},
            "/v1/chat/completions",
            {"messages": CHAT, "max_completion_tokens": 60},
            "max_completion_tokens",
            "Key 'acme' may have 50 tokens in flight (max_tokens_in_flight), so this call can never be served",
        ),
        (
            {"tokens_per_minute": 2},
            "/v1/chat/completions",
            {"messages": CHAT},
            "messages",
            "4 prompt tokens. Key 'acme' may have 2 tokens a minute, so this call can never be served; send a shorter",
        ),
        (
            {"requests_per_minute": 5},
            "/v1/completions",
            {"prompt": ["a", "b"], "n": 3},
            "prompt.0",
            "This call asks for 6 answers. Key 'acme' may have 5 requests a minute",
        ),
        (
            {"max_running": 2, "max_queued": 3},
            "/v1/completions",
            {"prompt": "abc", "n": 6},
            "prompt",
            "Key 'acme' may have 2 answers running (max_running) and 3 waiting (max_queued)",
        ),
    ],
)
def test_a_call_that_can_never_be_served_is_told_what_to_lower(tmp_path, limits, route, fields, param, words):
    with keyed(tmp_path, **limits) as client:
        refused = ask(client, route=route, **fields)
        assert ask(client, "neighbour", route, **fields).status_code == 200

    assert (refused.status_code, error_of(refused)["param"]) == (400, param)
    assert words in error_of(refused)["message"]
    assert "Retry-After" not in refused.headers


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
        ("/v1/chat/completions", {"messages": CHAT, "n": 4, "max_tokens": 4}),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"n": 2}}),
    ],
)
def test_every_choice_of_every_prompt_is_a_request(tmp_path, route, fields):
    with keyed(tmp_path, requests_per_minute=10) as client:
        answers = [ask(client, route=route, **fields) for _ in range(3)]
        small = ask(client, prompt="abc", n=2)

    assert [answer.status_code for answer in [*answers, small]] == [200, 200, 429, 200]
    assert answers[2].headers["Retry-After"] == "12"
    assert error_of(answers[2])["message"].startswith("Key 'acme' may have 10 requests a minute, and this call asks")


def test_a_chat_without_a_limit_reserves_what_its_key_has_and_settles_what_it_used(tmp_path):
    """It says the alphabet until the context ends: its prompt of 4 tokens and 196 more."""
    with keyed(tmp_path, tokens_per_minute=150) as client:
        first = ask(client, route="/v1/chat/completions", messages=CHAT)
        later = ask(client, route="/v1/chat/completions", messages=CHAT, max_tokens=1)

    assert (first.status_code, first.json()["usage"]["total_tokens"]) == (200, CONTEXT)
    assert later.status_code == 429
    assert later.headers["Retry-After"] == "21", "50 below zero, and 1 to go on with"


def test_open_answers_hold_their_tokens_until_they_end(tmp_path):
    gate = Gate()
    body = {"prompt": "abc", "max_tokens": 60, "stream": True}
    with (
        keyed(tmp_path, FakeDevice(next_token=gate), max_tokens_in_flight=100) as client,
        client.stream("POST", "/v1/completions", json=body, headers={"x-api-key": "acme"}) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        refused = ask(client, prompt="abc", max_tokens=60)
        neighbour = client.stream("POST", "/v1/completions", json=body, headers={"x-api-key": "neighbour"})
        with neighbour as other:
            assert other.status_code == 200
            gate.set()
            list(lines)
        served = ask(client, prompt="abc", max_tokens=60)

    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    assert error_of(refused)["message"] == (
        "Key 'acme' may have 100 tokens in flight (max_tokens_in_flight), and this call reserves 63; come back when an "
        "open answer has ended."
    )
    assert served.status_code == 200


@pytest.mark.parametrize(
    ("route", "fields"), [("/v1/tokenize", {"prompt": "abcdef"}), ("/v1/detokenize", {"tokens": [97] * 6})]
)
def test_tokenizing_is_metered(tmp_path, route, fields):
    with keyed(tmp_path, tokens_per_minute=20) as client:
        by_tokens = [ask(client, route=route, **fields) for _ in range(5)]
    with keyed(tmp_path, requests_per_minute=2) as client:
        by_requests = [ask(client, route=route, **fields) for _ in range(3)]
        neighbour = ask(client, "neighbour", route, **fields)

    # Tokens are charged afterwards: the fourth call is let in with 2 tokens left.
    assert [answer.status_code for answer in by_tokens] == [200, 200, 200, 200, 429]
    assert by_tokens[4].headers["Retry-After"] == "15", "4 below zero, and 1 to go on with"
    assert [answer.status_code for answer in by_requests] == [200, 200, 429]
    assert neighbour.status_code == 200


def test_an_echo_without_output_reserves_its_prompt_alone(tmp_path):
    with keyed(tmp_path, tokens_per_minute=3) as client:
        assert ask(client, prompt="abc", max_tokens=0, echo=True, logprobs=1).status_code == 200
        assert ask(client, prompt="a", max_tokens=0, echo=True).status_code == 429
