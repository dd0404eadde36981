"""However an answer ends, its tokens are settled exactly once."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from rota.core.config import ServerConfig
from rota.core.errors import RequestError
from rota.core.request import SamplingParams
from rota.runtime.registry import Registry
from rota.server.access.access import Access
from rota.server.access.keys import Key
from rota.server.access.limits import CallDemand
from rota.server.answers.answer import Answer
from rota.server.calls.call import Call
from rota.server.calls.prompts import CallPrompts
from rota.server.context import AppContext
from rota.server.errors import ClientGone
from rota.server.open_answers import CallIdentity
from rota.server.traffic.route import Chosen
from rota.text.tokenizer import Tokenizer
from tests.fakes import FakeDevice, alphabet
from tests.server.applications import made_app
from tests.server.endless import ENDLESS, endless_device
from tests.server.engines import engines
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S

MOST = 4 * ENDLESS
ALICE = Key("alice", tokens_per_minute=MOST, max_tokens_in_flight=MOST)
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
    key: Key = ALICE,
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
                context.access.admission.admit(ALICE, CallDemand(output_tokens=tokens), None, ""), 0
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
    with pytest.raises(ClientGone):
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
