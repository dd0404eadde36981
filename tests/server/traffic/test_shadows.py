"""Copies for shadows are few, come last, and are never waited for."""

from __future__ import annotations

from typing import cast

import pytest

from rota.core.adapter import Adapter
from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import Finished, FinishReason
from rota.core.ids import AdapterId, RequestId
from rota.core.request import Request
from rota.server.access.keys import MAX_ASKED_PRIORITY
from rota.server.streams import CallReply
from rota.server.traffic.traffic import LOWEST_PRIORITY, ROWS_PER_COPY, TENANT, TIMEOUT_S, Shadows
from tests.builders import request
from tests.scheduler.stage import Stage, seated

SHADOW = Adapter(adapter_id=AdapterId(7), name="shadow", path="/adapters/shadow")


class Closed:
    """Stands in for a reply: whether it was closed."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Post:
    """Takes copies, at a time that a test sets."""

    def __init__(self, rows: int = 2 * ROWS_PER_COPY, refusal: RequestError | None = None) -> None:
        self.sent: list[Request] = []
        self.replies: list[Closed] = []
        self.now = 0.0
        self._refusal = refusal
        self.shadows = Shadows(self._send, lambda: rows, now=lambda: self.now)

    def _send(self, copy: Request) -> CallReply:
        if self._refusal:
            raise self._refusal
        self.sent.append(copy)
        self.replies.append(Closed())
        return cast(CallReply, self.replies[-1])

    def copy(self, *names: str) -> None:
        self.shadows.copy([request(name) for name in names], SHADOW)

    def end(self, name: str) -> None:
        ending = Finished(request_id=RequestId(name), at=1.0, reason=FinishReason.LENGTH)
        self.shadows.ended(RequestId(name), ending)


def test_a_copy_asks_the_same_of_the_shadow_behind_everything_else():
    post = Post()
    post.copy("a")
    (copy,) = post.sent
    real = request("a")

    assert (copy.prompt, copy.sampling) == (real.prompt, real.sampling)
    assert (copy.adapter_id, copy.tenant, copy.priority) == (SHADOW.adapter_id, TENANT, LOWEST_PRIORITY)
    assert copy.request_id != real.request_id
    assert LOWEST_PRIORITY < -MAX_ASKED_PRIORITY


def test_copies_are_as_few_as_the_rows_allow_and_the_others_are_dropped():
    post = Post()
    post.copy("a", "b", "c")
    assert [one.request_id for one in post.sent] == ["a-shadow", "b-shadow"]
    assert post.shadows.meters.shadows == {"dropped": 1}

    post.end("a-shadow")
    post.end("b")  # the real one
    post.copy("d", "e")
    assert [one.request_id for one in post.sent[2:]] == ["d-shadow"]
    assert post.shadows.meters.shadows == {"dropped": 2, "length": 1}


def test_the_smallest_server_has_room_for_one_copy():
    post = Post(rows=1)
    post.copy("a", "b")

    assert len(post.sent) == 1


def test_a_copy_that_takes_too_long_is_ended_and_makes_room():
    post = Post(rows=1)
    post.copy("a")
    post.now = TIMEOUT_S
    post.copy("b")

    assert [reply.is_closed for reply in post.replies] == [True, False]
    assert post.shadows.meters.shadows == {"dropped": 1}


@pytest.mark.parametrize("code", [FaultCode.ENGINE_DIED, FaultCode.STOPPING])
def test_a_service_that_is_down_takes_no_copy_and_the_request_does_not_hear_of_it(code):
    post = Post(refusal=RequestError(Fault(code, "The engine is down.")))
    post.copy("a", "b", "c")

    assert post.shadows.meters.shadows == {code.value: 3}


def test_a_real_request_gets_a_row_at_once_though_copies_have_taken_all():
    stage = Stage(adapters=0, rows=2)
    for name in ("copy0", "copy1"):
        stage.ask(name, tenant=TENANT, priority=LOWEST_PRIORITY, max_new_tokens=400)
    stage.step()
    stage.ask("real")

    assert seated(stage.step()) == ["real"]
