"""While tenants send the largest bodies and the worst grammars, the event loop goes on for all others."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from benchmarks.grammar_flood import HOSTILE, flooded
from rota.server.access.keys import Key, KeyRing, digest_of
from tests.builders import capacity
from tests.fakes import FakeDevice, alphabet
from tests.server.letters import serving
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("frozen_heap")  # a collection would count as work of the loop
MANY = 8_000
KEYS = KeyRing({digest_of(name): Key(name) for name in ("attacker", "tenant")})
ATTACK = json.dumps({"messages": [{"role": "user", "content": "a"}] * MANY}).encode()
# Large enough for a worker, which it starts.
FIRST = json.dumps({"messages": [{"role": "user", "content": "a"}] * 100}).encode()
CALLS = 4
LONGEST_BLOCK_S = 0.05


class Pulse:
    """Knows for how long the event loop worked at a time, in processor time: a busy machine does not change that."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []
        self.longest_s = 0.0

    def around(self, app: FastAPI) -> Pulse:
        self._app = app
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._tasks:
            self._tasks.append(asyncio.create_task(self._beat()))
        await self._app(scope, receive, send)

    async def _beat(self) -> None:
        last = time.thread_time()
        while True:
            # Time is what is tested. This is how often the loop is looked at.
            await asyncio.sleep(0.001)
            now = time.thread_time()
            self.longest_s = max(self.longest_s, now - last)
            last = now


@pytest.fixture(scope="module")
def heartbeat() -> Pulse:
    return Pulse()


@pytest.fixture(scope="module")
def url(heartbeat: Pulse, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # The conversation fits: each message is two tokens.
    device = FakeDevice(next_token=alphabet, capacity=capacity(max_sequence_tokens=200_000, blocks=512))
    with serving(tmp_path_factory.mktemp("model"), device, keys=KEYS, around=heartbeat.around) as client:
        yield str(client.base_url)


def client_of(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"})


def test_four_calls_with_thousands_of_messages_hold_up_no_other_client(url: str, heartbeat: Pulse):
    with client_of(url, "attacker") as attacker, client_of(url, "tenant") as tenant, ThreadPoolExecutor() as threads:
        assert attacker.post("/tokenize", content=FIRST).json()["count"] == 200
        heartbeat.longest_s = 0.0

        calls = [threads.submit(attacker.post, "/tokenize", content=ATTACK) for _ in range(CALLS)]
        for _ in range(CALLS):
            assert tenant.get("/health").status_code == 200
            answer = tenant.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5})
            assert answer.json()["usage"]["completion_tokens"] == 5

        assert [call.result().json()["count"] for call in calls] == [2 * MANY] * CALLS
        assert heartbeat.longest_s <= LONGEST_BLOCK_S


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_a_large_body_for_an_answer_holds_up_no_other_client(route: str, url: str, heartbeat: Pulse):
    fields = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}] * MANY + [{"role": "nurse"}]},
        "/v1/completions": {"prompt": [[97]] * MANY, "max_tokens": 1},
        "/generate": {"text": "a", "sampling_params": [{"max_new_tokens": 1}] * MANY},
    }
    with client_of(url, "attacker") as attacker:
        attacker.post("/tokenize", content=FIRST)
        heartbeat.longest_s = 0.0
        answer = attacker.post(route, json=fields[route])

    assert answer.status_code == 400
    assert heartbeat.longest_s <= LONGEST_BLOCK_S


def test_a_long_prompt_is_answered_as_a_short_one_is(url: str):
    with client_of(url, "tenant") as tenant:
        body = {"prompt": [97] * 1_000, "max_tokens": 3, "user": "x" * 40_000}
        answer = tenant.post("/v1/completions", json=body).json()

    assert answer["usage"]["prompt_tokens"] == 1_000
    assert len(answer["choices"][0]["text"]) == 3


# Of processor time, which a busy machine does not change: one check in the event loop's or the engine's thread takes
# longer, and so does the start of a process there.
LATE_S = 0.25


@pytest.mark.usefixtures("frozen_heap")
def test_a_flood_of_hostile_grammars_holds_up_neither_the_event_loop_nor_the_engine(tmp_path: Path):
    heartbeat, at, engine_s = Pulse(), dict[int, float](), list[float]()

    def next_letter(tokens: Sequence[int]) -> int:
        thread, now = threading.get_ident(), time.thread_time()
        engine_s.append(now - at.get(thread, now))
        at[thread] = now
        return alphabet(tokens)

    with serving(tmp_path, FakeDevice(next_token=next_letter), has_grammars=True, around=heartbeat.around) as client:
        client.post("/v1/completions", json={"prompt": "a", "guided_regex": "a"}).raise_for_status()
        with flooded(str(client.base_url), clients=2) as answers:
            while len(answers) < 2 * len(HOSTILE):
                count = len(answers)
                client.post("/v1/completions", json={"prompt": "a", "max_tokens": 60}).raise_for_status()
                assert until(lambda: len(answers) > count)  # noqa: B023

    assert {status for status, _ in answers} == {200, 400}
    assert max(heartbeat.longest_s, *engine_s) < LATE_S
