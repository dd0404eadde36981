from __future__ import annotations

from collections.abc import Iterable

import httpx

from rota.core.events import Event
from rota.core.ids import AdapterId, RequestId
from rota.runtime.registry import Registry
from rota.server.streams import Observers
from rota.text.tokenizer import Tokenizer
from tests.builders import request
from tests.server.applications import made_app
from tests.server.engines import engines
from tests.server.letters import letters_device
from tests.server.running import running
from tests.tiny_tokenizer import write_byte_tokenizer


class Clumsy:
    """An observer that fails whenever it is told something."""

    def asked(self, request_id: RequestId, adapter: AdapterId, at: float, tenant: str = "") -> None:
        raise KeyError(request_id)

    def observe(self, events: Iterable[Event]) -> None:
        raise ZeroDivisionError


def test_those_behind_one_that_fails_hear_everything_and_the_log_has_it_once(caplog):
    heard: list[list[Event]] = []
    observers = Observers([Clumsy()], [heard.append])

    for _ in range(3):
        observers.asked(request("a"))
        observers.observe([])

    assert heard == [[]] * 3
    assert [record.getMessage().split()[0] for record in caplog.records] == ["Clumsy.asked", "Clumsy.observe"]
    assert caplog.records[1].exc_info[0] is ZeroDivisionError


def test_an_observer_that_fails_holds_back_nobodys_answer(tmp_path):
    service = engines(letters_device)
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path))
    app = made_app(service, tokenizer, Registry("letters", "/letters"), watchers=[Clumsy()])
    with running(app) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 3})

    assert answer.json()["choices"][0]["text"] == "def"
