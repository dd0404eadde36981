"""Answers that are being made have names and can be called off; however one ends, its tokens are settled once."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from starlette.requests import ClientDisconnect

from rota.core.config import ServerConfig
from rota.core.errors import RequestError
from rota.core.request import SamplingParams
from rota.runtime.registry import Registry
from rota.server.access.access import Access
from rota.server.access.keys import Key, KeyRing, digest_of
from rota.server.access.limits import CallDemand
from rota.server.answers.answer import TOKENS_AT_A_TIME, Answer
from rota.server.calls.call import Call
from rota.server.calls.prompts import CallPrompts
from rota.server.context import AppContext
from rota.server.open_answers import CallIdentity
from rota.server.streams import Delta
from rota.server.traffic.route import Chosen
from rota.text.tokenizer import Tokenizer
from tests.fakes import FakeDevice, alphabet
from tests.server.applications import made_app
from tests.server.endless import ENDLESS, endless_device
from tests.server.engines import engines
from tests.server.letters import Gate, error_of, serving
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, until

# ── settling ──────────────────────────────────────────────────────────────────────────────────────────────────────────

MOST = 4 * ENDLESS
SPENDER = Key("alice", tokens_per_minute=MOST, max_tokens_in_flight=MOST)
PROMPT = (97, 98)


@asynccontextmanager
async def context_around(folder: Path, device: FakeDevice, timeout_s: float | None = None) -> AsyncIterator[AppContext]:
    """Its clock stands still, so that no token comes back by waiting."""
    service = engines(lambda: device)
    registry = Registry("letters", "/models/letters")
    access = Access(registry, now=lambda: 0.0)
    tokenizer = Tokenizer(write_byte_tokenizer(folder))
    app = made_app(service, tokenizer, registry, access, ServerConfig(request_timeout=timeout_s))
    context: AppContext = app.state.context
    context.streams.start()
    try:
        yield context
    finally:
        await asyncio.to_thread(service.stop)


def opened(
    context: AppContext,
    max_new_tokens: int = ENDLESS,
    choices: int = 1,
    key: Key = SPENDER,
    name: str = "mine",
    stop: tuple[str, ...] = (),
) -> Answer:
    """An answer of the base model."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens, stop=stop)
    call = Call(
        prompts=CallPrompts((PROMPT,), ("prompt",)), samplings=(sampling,), choices=choices, limit_param="max_tokens"
    )
    return Answer(context, CallIdentity(key, name), call, f"cmpl-{name}", [Chosen(context.registry.base)])


def left(context: AppContext) -> int:
    """The most tokens that the key could reserve now."""

    def fits(tokens: int) -> bool:
        try:
            context.access.admission.settle(
                context.access.admission.admit(SPENDER, CallDemand(output_tokens=tokens), None, ""), 0
            )
        except RequestError:
            return False
        return True

    return bisect_left(range(MOST + 1), True, key=lambda tokens: not fits(tokens)) - 1


async def finish(_: AppContext, answer: Answer) -> None:
    while not answer.is_finished:
        await answer.next()


async def cancel(context: AppContext, answer: Answer) -> None:
    await answer.next()
    (entry,) = context.answers
    entry.cancel()
    await finish(context, answer)


async def leave(_: AppContext, answer: Answer) -> None:
    await answer.next()
    answer.reply.abandon()
    with pytest.raises(ClientDisconnect):
        await answer.next()


async def leave_without_reading(_: AppContext, answer: Answer) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while answer.reply.produced < 5:
            await asyncio.sleep(0)
    answer.reply.abandon()


async def stop(context: AppContext, answer: Answer) -> None:
    await answer.next()
    await asyncio.to_thread(context.service.stop)
    with pytest.raises(RequestError, match="stopping"):
        await finish(context, answer)


async def fail(context: AppContext, answer: Answer, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        await finish(context, answer)


def breaks(tokens: Sequence[int], at: int) -> int:
    if len(tokens) == at:
        raise ZeroDivisionError("a kernel went wrong")
    return alphabet(tokens)


breaks_at_20 = partial(breaks, at=20)


@pytest.mark.parametrize(
    ("end", "device", "timeout_s"),
    [
        pytest.param(finish, partial(FakeDevice, next_token=alphabet), None, id="by itself"),
        pytest.param(cancel, endless_device, None, id="aborted"),
        pytest.param(leave, endless_device, None, id="its client left"),
        pytest.param(leave_without_reading, endless_device, None, id="its client left and had read nothing"),
        pytest.param(stop, endless_device, None, id="the server stopped"),
        pytest.param(partial(fail, words="did not end within"), endless_device, 0.5, id="timed out"),
        pytest.param(
            partial(fail, words="engine"), partial(FakeDevice, next_token=breaks_at_20), None, id="the engine died"
        ),
    ],
)
@pytest.mark.usefixtures("capsys")
def test_an_answer_that_has_begun_costs_what_the_engine_made_and_no_more(tmp_path, end, device, timeout_s):
    async def test() -> None:
        async with context_around(tmp_path, device(), timeout_s) as context:
            answer = opened(context, 400 if end is finish else ENDLESS)
            await end(context, answer)
            for _ in range(2):
                answer.close()
            produced = answer.reply.produced
            assert end is not finish or produced == 400
            # An error before the first token costs nothing; on a slow machine the time-out may come so early.
            assert left(context) == (MOST - len(PROMPT) - produced if produced else MOST)

    asyncio.run(test())


@pytest.mark.usefixtures("capsys")
def test_an_answer_that_fails_before_its_first_token_costs_nothing(tmp_path):
    async def test() -> None:
        async with context_around(tmp_path, FakeDevice(next_token=partial(breaks, at=len(PROMPT)))) as context:
            answer = opened(context)
            await fail(context, answer, "engine")
            answer.close()
            assert left(context) == MOST

    asyncio.run(test())


@pytest.mark.usefixtures("capsys")
def test_a_call_that_the_service_does_not_take_costs_nothing(tmp_path):
    async def test() -> None:
        async with context_around(tmp_path, FakeDevice()) as context:
            await asyncio.to_thread(context.service.stop)
            with pytest.raises(RequestError, match="stop"):
                opened(context)
            assert left(context) == MOST

    asyncio.run(test())


def test_while_an_answer_is_open_all_that_it_may_take_is_reserved(tmp_path):
    async def test() -> None:
        async with context_around(tmp_path, endless_device()) as context:
            answer = opened(context, max_new_tokens=100, choices=3)
            assert left(context) == MOST - len(PROMPT) - 300
            with pytest.raises(RequestError, match="still open"):
                opened(context, max_new_tokens=100, choices=3)
            assert left(context) == MOST - len(PROMPT) - 300, "a call that is refused holds nothing"
            answer.close()

    asyncio.run(test())


# ── names and charges ─────────────────────────────────────────────────────────────────────────────────────────────────

ALICE = Key("alice", priority=3)
ask = partial(opened, key=ALICE)


@pytest.fixture
def with_front(tmp_path) -> Callable[..., None]:
    """Runs a test on an event loop, with a front around a device."""

    def run(test: Callable[[AppContext], Awaitable[None]], device: FakeDevice) -> None:
        async def body() -> None:
            async with context_around(tmp_path, device) as context:
                await test(context)

        asyncio.run(body())

    return run


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.said.content for delta in deltas)


async def wait_for_end(answer: Answer) -> None:
    while not answer.is_finished:
        await answer.next()


def test_an_open_answer_is_found_by_every_name_it_has_and_by_none_afterwards(with_front):
    async def test(context: AppContext) -> None:
        answer = ask(context, choices=2)
        names = ["mine", "cmpl-mine", "cmpl-mine-0-0", "cmpl-mine-0-1"]
        (entry,) = context.answers
        assert all(context.answers.find(ALICE, name) is entry for name in names)
        assert (entry.caller.key, [request.priority for request in entry.requests]) == (ALICE, [3, 3])
        answer.close()
        assert [context.answers.find(ALICE, name) for name in names] == [None] * 4
        assert list(context.answers) == []

    with_front(test, FakeDevice())


def test_a_name_is_open_once_at_a_time(with_front):
    async def test(context: AppContext) -> None:
        first = ask(context)
        with pytest.raises(RequestError, match=r"A request with the id '.*mine' is still open") as refused:
            ask(context)
        assert refused.value.fault.code == "duplicate_id"
        assert context.answers.find(ALICE, "mine"), "the first one is still there"
        first.close()
        ask(context).close()

    with_front(test, FakeDevice())


def test_two_keys_may_use_the_same_name_and_each_finds_its_own(with_front):
    bob, operator = Key("bob", may_operate=False), Key("operator")

    async def test(context: AppContext) -> None:
        hers, his = ask(context), ask(context, key=bob)
        found = {key.name: context.answers.find(key, "mine") for key in (ALICE, bob, operator)}
        assert {name: one and one.caller.key for name, one in found.items()} == {
            "alice": ALICE,
            "bob": bob,
            "operator": ALICE,
        }
        hers.close()
        assert context.answers.find(operator, "mine") is found["bob"]
        assert context.answers.find(Key("eve", may_operate=False), "mine") is None
        his.close()
        assert list(context.answers) == []

    with_front(test, FakeDevice())


def test_whoever_leaves_and_comes_back_under_the_same_name_hears_nothing_of_what_it_left(with_front):
    async def test(context: AppContext) -> None:
        left = ask(context)
        await left.next()
        left.close()
        answer = ask(context, max_new_tokens=6)
        deltas: list[Delta] = []
        while not answer.is_finished:
            deltas += await answer.next()
        assert (text_of(deltas), deltas[-1].finish_reason) == ("cdefgh", "length")
        answer.close()

    with_front(test, endless_device())


def test_an_answer_that_nobody_reads_before_its_end_is_made_of_few_pieces(with_front, monkeypatch):
    async def test(context: AppContext) -> None:
        answer = ask(context, max_new_tokens=100, choices=2)
        read, reads = answer.reply.next, []
        monkeypatch.setattr(answer.reply, "next", lambda: reads.append(1) or read())
        deltas = await answer.whole()
        answer.close()
        assert [(len(delta.tokens), delta.finish_reason) for delta in deltas] == [(100, "length")] * 2
        assert len(reads) < 2 * (100 // TOKENS_AT_A_TIME + 2)

    with_front(test, FakeDevice(next_token=alphabet))


def test_stop_strings_are_looked_for_in_every_token(with_front):
    async def test(context: AppContext) -> None:
        answer = ask(context, stop=("f",))
        (delta,) = await answer.whole()
        answer.close()
        assert (delta.said.content, delta.finish_reason) == ("cde", "stop")
        assert answer.reply.wakes_at == 1

    with_front(test, endless_device())


def test_an_answer_called_off_ends_with_what_it_has_and_says_so(with_front):
    async def test(context: AppContext) -> None:
        answer = ask(context)
        deltas = await answer.next()
        entry = context.answers.find(ALICE, "mine")
        assert entry is not None
        entry.reply.cancel()
        while not answer.is_finished:
            deltas += await answer.next()
        text = text_of(deltas)
        assert text.startswith("cdef"[: len(text)])
        assert deltas[-1].finish_reason == "abort"
        answer.close()

    with_front(test, endless_device())


def test_an_answer_that_the_service_itself_ends_is_an_error(with_front):
    async def test(context: AppContext) -> None:
        answer = ask(context)
        await answer.next()
        await asyncio.to_thread(context.service.stop)
        with pytest.raises(RequestError, match="stopping") as ended:
            await wait_for_end(answer)
        assert ended.value.fault.code == "server_stopping"
        answer.close()

    with_front(test, endless_device())


def test_a_clients_own_name_is_in_the_answers_id_and_headers(tmp_path):
    with serving(tmp_path) as client:
        given = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "job-7"})
        made = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        bad = client.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "a b"})

    assert (given.json()["id"], given.headers["X-Request-Id"]) == ("cmpl-job-7", "job-7")
    assert made.json()["id"] == f"cmpl-{made.headers['X-Request-Id']}"
    assert (bad.status_code, error_of(bad)["param"]) == (400, "X-Request-Id")


def keys(**limits: int) -> KeyRing:
    return KeyRing({digest_of("secret"): Key("acme", frozenset({"pirate"}), may_use_base=False, **limits)})


AS_ACME = {"Authorization": "Bearer secret"}


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/v1/tokenize"])
def test_a_key_is_needed_and_reaches_only_its_own_adapters(tmp_path, route):
    content = {"messages": [{"role": "user", "content": "a"}]} if "chat" in route else {"prompt": "a"}
    with serving(tmp_path, keys=keys(), adapters=("pirate", "poet")) as client:
        statuses = [
            client.post(route, json={**content, "model": "pirate"}).status_code,
            client.post(route, json={**content, "model": "poet"}, headers=AS_ACME).status_code,
            client.post(route, json=content, headers=AS_ACME).status_code,
            client.post(route, json={**content, "model": "pirate"}, headers=AS_ACME).status_code,
        ]
        seen = [model["id"] for model in client.get("/v1/models", headers=AS_ACME).json()["data"]]
        hidden = client.get("/v1/models/poet", headers=AS_ACME).status_code

    assert statuses == [401, 403, 403, 200]
    assert (seen, hidden) == (["pirate"], 403)


def test_what_an_answer_did_not_use_can_be_used_at_once(tmp_path):
    asked = {"model": "pirate", "prompt": "ab", "max_tokens": 100, "stop": "e"}  # it says "cde"
    with serving(tmp_path, keys=keys(tokens_per_minute=107), adapters=("pirate",)) as client:
        responses = [client.post("/v1/completions", json=asked, headers=AS_ACME) for _ in range(3)]

    assert [response.status_code for response in responses] == [200, 200, 429]
    assert responses[2].headers["Retry-After"] == "3"  # 5 of 107 tokens, which come in 2.8 seconds


def test_an_answer_given_up_is_charged_for_what_it_took(tmp_path):
    given_up = {"model": "pirate", "prompt": "x" * 60, "max_tokens": 100, "stream": True}
    gate, limited = Gate(at=65), keys(tokens_per_minute=160)
    with serving(tmp_path, FakeDevice(next_token=gate), keys=limited, adapters=("pirate",)) as client:
        client.headers.update(AS_ACME)
        with client.stream("POST", "/v1/completions", json=given_up) as stream:
            lines = stream.iter_lines()  # httpx closes a stream whose lines are dropped
            next(lines)
            asked_about = f"/v1/requests/{stream.headers['X-Request-Id']}"
            assert client.get(asked_about).status_code == 200
        assert until(lambda: client.get(asked_about).status_code == 404), "the server has not seen it leave"
        gate.set()
        refused, small = (
            client.post("/v1/completions", json={"model": "pirate", "prompt": "x", "max_tokens": tokens})
            for tokens in (99, 1)
        )

    assert (refused.status_code, small.status_code) == (429, 200)


def test_what_is_refused_costs_no_tokens(tmp_path):
    asked = {"model": "pirate", "prompt": "x" * 600, "max_tokens": 1}
    with serving(tmp_path, keys=keys(tokens_per_minute=700), adapters=("pirate",)) as client:
        statuses = [client.post("/v1/completions", json=asked, headers=AS_ACME).status_code for _ in range(3)]

    assert statuses == [400] * 3
