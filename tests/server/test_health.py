from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import partial

import httpx
import pytest

from rota.core.config import EngineConfig, SchedulerConfig
from rota.core.errors import EngineDiedError, ModelError
from rota.runtime.registry import Registry
from rota.runtime.service import BuildDevice, InProcessService
from rota.server.app import create_app
from rota.text.tokenizer import Tokenizer
from tests.fakes import FakeDevice
from tests.server.running import running
from tests.tiny_tokenizer import write_byte_tokenizer


@pytest.fixture
def serve(tmp_path):
    """Starts a server around a device; gives a client and the service."""
    with ExitStack() as stack:

        def serve(build_device: BuildDevice, config: EngineConfig | None = None):
            service = InProcessService(build_device, config or EngineConfig())
            app = create_app(service, Tokenizer(write_byte_tokenizer(tmp_path)), Registry("letters", str(tmp_path)))
            url = stack.enter_context(running(app))
            return stack.enter_context(httpx.Client(base_url=url, timeout=20.0)), service

        yield serve


def no_such_model() -> FakeDevice:
    raise ModelError("There is no model in /nowhere.")


def test_health_is_503_while_starting_and_200_when_ready(serve):
    may_start = threading.Event()

    def build() -> FakeDevice:
        may_start.wait()
        return FakeDevice()

    client, service = serve(build)
    starting = client.get("/health")
    may_start.set()
    service.wait_until_ready()
    ready = client.get("/health")

    assert (starting.status_code, starting.json()) == (503, {"status": "starting"})
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})


def test_an_engine_that_is_down_is_503_everywhere_and_says_why(serve):
    client, service = serve(no_such_model)
    with pytest.raises(EngineDiedError):
        service.wait_until_ready()
    health = client.get("/health")
    answer = client.post("/v1/completions", json={"prompt": "abc"})

    assert (health.status_code, health.json()) == (503, {"status": "down", "reason": "There is no model in /nowhere."})
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "There is no model in /nowhere."
    assert int(answer.headers["Retry-After"]) > 0


def breaks_at_ten(tokens):
    if len(tokens) == 10:
        raise ZeroDivisionError("a kernel went wrong")
    return 97


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_engine_that_dies_in_the_middle_of_an_answer_ends_it_with_an_error(serve, is_streamed, capsys):
    client, _ = serve(partial(FakeDevice, next_token=breaks_at_ten, step_s=0.01))
    response = client.post("/v1/completions", json={"prompt": "abc", "stream": is_streamed})

    assert response.status_code == (200 if is_streamed else 503)
    assert '"code":"engine_died"' in response.text
    assert "a kernel went wrong" in response.text
    assert response.text.endswith("data: [DONE]\n\n") is is_streamed


def test_a_full_queue_is_429_with_a_time_to_come_back(serve):
    client, _ = serve(partial(FakeDevice, step_s=0.01), EngineConfig(scheduler=SchedulerConfig(max_queued_requests=1)))
    response = client.post("/v1/completions", json={"prompt": ["a"] * 40, "max_tokens": 400})

    assert response.status_code == 429
    assert int(response.headers["Retry-After"]) > 0
    assert response.json()["error"]["type"] == "rate_limit_error"
