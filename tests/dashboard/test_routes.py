"""The dashboard over HTTP: its page and its figures, once or as a stream."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import aclosing

import httpx
import pytest

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.messages import Inspect
from rota.dashboard.feed import Feed
from rota.dashboard.routes import FRAME_S, Viewers
from rota.runtime.registry import Registry
from rota.runtime.service import ServicePhase, ServiceState
from rota.server.access.keys import Key
from tests.builders import capacity
from tests.dashboard.stage import Stage
from tests.waiting import TIMEOUT_S, until


def first_frame(made: Stage, **headers: str) -> dict[str, object]:
    with httpx.stream("GET", f"{made.url}/dashboard/events", headers=headers) as reply:
        assert reply.status_code == 200
        return json.loads(next(reply.iter_lines()).removeprefix("data: "))


def test_the_page_may_speak_to_its_own_server_only(on_stage):
    made = on_stage()
    page = httpx.get(f"{made.url}/dashboard")

    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert "unsafe" not in page.headers["content-security-policy"]
    assert "http://" not in page.text.replace("http://www.w3.org", "")


def test_parts_of_the_page_come_with_their_kind_and_others_do_not_come(on_stage):
    made = on_stage()
    script = httpx.get(f"{made.url}/dashboard/main.js")
    missing = httpx.get(f"{made.url}/dashboard/secret.py")

    assert (script.status_code, script.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    assert missing.status_code == 404
    assert "no such part" in missing.json()["error"]["message"]


def test_with_keys_the_page_is_open_and_its_data_is_for_operators(on_stage):
    made = on_stage(keys={"all": Key("all"), "tenant": Key("tenant", may_operate=False)})

    assert httpx.get(f"{made.url}/dashboard").status_code == 200
    assert httpx.get(f"{made.url}/dashboard/main.js").status_code == 200
    assert httpx.get(f"{made.url}/dashboard/events").status_code == 401
    assert (
        httpx.get(
            f"{made.url}/dashboard/events", headers={"Authorization": "Bearer tenant"}, timeout=TIMEOUT_S
        ).status_code
        == 403
    )
    assert first_frame(made, Authorization="Bearer all")["may_load"] is True


def test_who_may_not_load_is_told_so(on_stage):
    made = on_stage(keys={"eye": Key("eye", may_load=False)})

    assert first_frame(made, Authorization="Bearer eye")["may_load"] is False


def test_a_reader_that_leaves_is_forgotten(on_stage):
    made = on_stage()
    first_frame(made)

    assert until(lambda: made.viewers.count == 0)


def test_the_engine_is_asked_only_while_somebody_watches(on_stage):
    made = on_stage()
    asked = []
    send = made.viewers._ask
    made.viewers._ask = lambda question: (asked.append(question), send(question))

    first_frame(made)
    assert until(lambda: made.viewers.count == 0)
    before = len(asked)
    time.sleep(2 * FRAME_S)  # time is what is tested: while two frames pass, nothing may happen
    assert 1 <= before == len(asked)


def test_an_open_page_does_not_keep_the_server_from_stopping(on_stage):
    made = on_stage()
    ended = threading.Event()

    def watch() -> None:
        with httpx.stream("GET", f"{made.url}/dashboard/events") as reply:
            for line in reply.iter_lines():
                seen.set()
                if '"phase":"draining"' in line:
                    told.set()
        ended.set()

    seen, told = threading.Event(), threading.Event()
    threading.Thread(target=watch, daemon=True).start()
    assert seen.wait(TIMEOUT_S)
    made.service.close()
    assert told.wait(TIMEOUT_S), "no frame says that the server stops"
    made.service.stop()

    assert ended.wait(TIMEOUT_S)


def test_journals_are_served_by_name_from_their_folder_and_from_nowhere_else(on_stage, tmp_path):
    journals = tmp_path / "journals"
    journals.mkdir()
    (journals / "run.jsonl").write_text('{"event":"asked"}\n')
    (journals / "notes.txt").write_text("secret")
    (tmp_path / "other.jsonl").write_text("secret")
    made = on_stage(journal_dir=journals)

    assert httpx.get(f"{made.url}/dashboard/journals/run.jsonl").text == '{"event":"asked"}\n'
    for name in ("notes.txt", "missing.jsonl", "..%2Fother.jsonl", "%2Fetc%2Fpasswd", ".jsonl"):
        assert httpx.get(f"{made.url}/dashboard/journals/{name}").status_code == 404, name


def test_without_a_folder_there_are_no_journals_and_it_says_which_flag_makes_some(on_stage):
    reply = httpx.get(f"{on_stage().url}/dashboard/journals/run.jsonl")

    assert reply.status_code == 404
    assert "--journal-dir" in reply.json()["error"]["message"]


# ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────────

READY = ServiceState(phase=ServicePhase.READY, capacity=capacity())


@pytest.fixture
def feed():
    return Feed(Registry("letters", ""), lambda: READY)


def moment_of(packet: bytes) -> float:
    return json.loads(packet.removeprefix(b"data: "))["now"]


def test_a_slow_reader_gets_the_newest_frame_and_none_in_between(feed):
    async def read_slowly() -> tuple[float, float]:
        async with aclosing(Viewers(feed, lambda _: None).frames(may_load=False)) as frames:
            first = moment_of(await anext(frames))
            await asyncio.sleep(4 * FRAME_S)  # time is what is tested: it reads nothing while four frames pass
            return first, moment_of(await anext(frames))

    first, second = asyncio.run(read_slowly())
    assert second - first > 3 * FRAME_S, "it is older than the pause"


def test_however_many_watch_the_engine_is_asked_once_a_frame(feed):
    asked: list[Inspect] = []
    viewers = Viewers(feed, asked.append)

    async def watch() -> None:
        async with aclosing(viewers.frames(may_load=False)) as frames:
            for _ in range(3):
                await anext(frames)

    async def watch_together() -> None:
        await asyncio.gather(*(watch() for _ in range(20)))

    asyncio.run(watch_together())
    assert 3 <= len(asked) < 20, "twenty would ask sixty times"
    assert viewers.count == 0


def test_an_engine_that_cannot_be_asked_ends_no_stream(feed):
    def refuse(_: Inspect) -> None:
        raise RequestError(Fault(FaultCode.ENGINE_DIED, "It is down."))

    async def read() -> bytes:
        async with aclosing(Viewers(feed, refuse).frames(may_load=False)) as frames:
            return await anext(frames)

    assert moment_of(asyncio.run(read())) <= time.monotonic()
