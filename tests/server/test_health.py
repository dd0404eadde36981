from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from rota.core.config import EngineConfig, SchedulerConfig
from rota.core.errors import EngineDiedError
from rota.core.standstill import StoodStill
from rota.runtime.registry import Registry
from rota.runtime.replicas.roster import joint_state
from rota.runtime.service import BuildDevice, ServicePhase, ServiceState, StateBoard
from rota.server.access.access import Access
from rota.server.app import PROBES
from rota.server.route import add_routes
from rota.text.tokenizer import Tokenizer
from tests.builders import capacity
from tests.fakes import FakeDevice, no_such_model
from tests.server.applications import made_app, running
from tests.server.endless import ENDLESS, endless_device
from tests.server.engines import REPLICAS, as_of_one, engines
from tests.server.letters import counts
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, until

TWO_WAIT = EngineConfig(scheduler=SchedulerConfig(max_queued_requests=2))


@pytest.fixture
def serve(tmp_path):
    """Starts a server around a device; gives a client and the service."""
    with ExitStack() as stack:

        def serve(build_device: BuildDevice, config: EngineConfig | None = None):
            service = engines(build_device, config)
            tokenizer, registry = Tokenizer(write_byte_tokenizer(tmp_path)), Registry("letters", str(tmp_path))
            app = made_app(service, tokenizer, registry, engine=config)
            url = stack.enter_context(running(app))
            return stack.enter_context(httpx.Client(base_url=url)), service

        yield serve


@pytest.mark.parametrize("path", ["/health", "/readyz"])
def test_readiness_is_503_while_starting_and_200_when_ready(serve, path):
    may_start = threading.Event()

    def build() -> FakeDevice:
        assert may_start.wait(TIMEOUT_S)
        return FakeDevice()

    client, service = serve(build)
    starting, starting_head, alive = client.get(path), client.head(path), client.get("/livez")
    may_start.set()
    service.wait_until_ready()
    ready, ready_head = client.get(path), client.head(path)

    assert (starting.status_code, starting.json()) == (503, {"status": "starting"})
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
    assert [(head.status_code, head.content) for head in (starting_head, ready_head)] == [(503, b""), (200, b"")]
    assert (alive.status_code, alive.json()) == (200, {"status": "starting"})


def test_an_engine_that_is_down_is_503_everywhere_and_says_why(serve):
    client, service = serve(no_such_model)
    with pytest.raises(EngineDiedError):
        service.wait_until_ready()
    health, ready, live = (client.get(path) for path in ("/health", "/readyz", "/livez"))
    asked = {"prompt": "abc"}
    answers = [client.post("/v1/completions", json=one) for one in (asked, asked | {"echo": True, "max_tokens": 0})]

    assert (health.status_code, health.json()["status"]) == (503, "down")
    assert as_of_one(health.json()["reason"]) == "There is no model in /nowhere."
    assert [(one.status_code, one.json()) for one in (ready, live)] == [(503, health.json())] * 2
    for answer in answers:
        assert answer.status_code == 503
        assert as_of_one(answer.json()["error"]["message"]) == "There is no model in /nowhere."
        assert int(answer.headers["Retry-After"]) > 0


STUCK = StoodStill(at=10.0, since=0.0, requests=1)
WAITS = replace(STUCK, waits_for="copies into slots (1)")


@pytest.mark.parametrize(
    ("standstills", "status", "said"),
    [
        ([WAITS], (200, "ready"), r"Engine 0: No step for \d+ seconds, while requests wait for copies"),
        ([STUCK], (503, "stuck"), r"Engine 0: No step for \d+ seconds, while requests wait for nothing"),
        ([None, STUCK], (200, "ready"), "^Engine 1: No step"),
        ([STUCK, WAITS], (200, "ready"), "Engine 0: No step .* Engine 1: No step"),
    ],
)
def test_an_engine_that_stands_still_says_so_and_is_503_if_nothing_is_under_way(standstills, status, said):
    boards = [StateBoard() for _ in standstills]
    for board, standstill in zip(boards, standstills, strict=True):
        board.set(ServiceState(phase=ServicePhase.READY, capacity=capacity()))
        board.note_events([standstill] if standstill else [])
    service = SimpleNamespace(state=joint_state([board.state for board in boards]))
    app, access = FastAPI(), Access(Registry("letters", "/letters"))
    context = SimpleNamespace(service=service, pausing=SimpleNamespace(paused_at=None), access=access)
    add_routes(app, PROBES, context, access)
    with running(app) as url:
        ready, live = httpx.get(f"{url}/readyz"), httpx.get(f"{url}/livez")

    assert (ready.status_code, ready.json()["status"]) == status
    assert re.search(said, ready.json()["reason"])
    assert live.status_code == 200


@pytest.mark.usefixtures("capsys")
@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_engine_that_dies_in_the_middle_of_an_answer_ends_it_with_an_error(serve, is_streamed):
    has_begun = threading.Event()
    if not is_streamed:  # nothing of it comes before its end
        has_begun.set()

    def breaks_at_ten(tokens: Sequence[int]) -> int:
        if len(tokens) == 10:
            assert has_begun.wait(TIMEOUT_S)
            raise ZeroDivisionError("a kernel went wrong")
        return 97

    client, _ = serve(partial(FakeDevice, next_token=breaks_at_ten))
    with client.stream("POST", "/v1/completions", json={"prompt": "abc", "stream": is_streamed}) as response:
        pieces = response.iter_text()
        said = next(pieces)
        has_begun.set()
        said += "".join(pieces)

    assert response.status_code == (200 if is_streamed else 503)
    assert '"code":"engine_died"' in said
    assert "a kernel went wrong" in said
    assert said.endswith("data: [DONE]\n\n") is is_streamed


def test_a_full_queue_is_429_with_a_time_to_come_back(serve):
    """On each replica one request runs and two wait, and one more finds no room."""
    client, service = serve(partial(endless_device, rows=1), TWO_WAIT)
    service.wait_until_ready()
    ask = partial(client.post, "/v1/completions", json={"prompt": "a", "max_tokens": ENDLESS})

    with ThreadPoolExecutor(3 * REPLICAS) as threads:
        for number in range(3 * REPLICAS):
            threads.submit(ask)
            assert until(lambda: counts(client)["waiting"] >= number + 1 - REPLICAS)  # noqa: B023
        response = ask()
        client.post("/abort_request", json={"abort_all": True})

    assert response.status_code == 429
    assert int(response.headers["Retry-After"]) > 0
    assert response.json()["error"]["type"] == "rate_limit_error"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory) -> Iterator[httpx.Client]:
    """A client of a server where two requests may wait."""
    folder = tmp_path_factory.mktemp("model")
    service, registry = engines(FakeDevice, TWO_WAIT), Registry("letters", str(folder))
    app = made_app(service, Tokenizer(write_byte_tokenizer(folder)), registry, engine=TWO_WAIT)
    with running(app) as url, httpx.Client(base_url=url) as client:
        service.wait_until_ready()
        yield client


MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("route", "fields", "param", "count"),
    [
        ("/v1/completions", {"prompt": "a", "n": 4}, "n", 4),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, "prompt", 4),
        ("/v1/completions", {"prompt": ["a", "b", "c"]}, "prompt", 3),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 3}, "n", 3),
        ("/generate", {"text": "a", "sampling_params": {"n": 3}}, "sampling_params.n", 3),
        ("/generate", {"text": ["a", "b", "c"]}, "text", 3),
    ],
)
def test_a_call_that_can_never_fit_the_queue_is_400_and_is_told_how_much_can(narrow, route, fields, param, count):
    response = narrow.post(route, json=fields)

    assert response.status_code == 400
    assert "Retry-After" not in response.headers
    assert response.json()["error"]["param"] == param
    assert response.json()["error"]["message"] == (
        f"{param} asks for {count} answers in one call; ask for at most 2, as many as may wait here "
        "(--max-queued-requests)."
    )


def test_a_call_that_just_fits_the_queue_is_answered(narrow):
    assert narrow.post("/v1/completions", json={"prompt": "a", "n": 2}).status_code == 200
