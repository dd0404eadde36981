"""An LLM object answers threads and coroutines at the same time, and leaves nothing behind when it is closed."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rota import LLM, SamplingParams
from rota.core.errors import ConfigError, EngineDiedError, RequestError, RotaError
from rota.core.ids import RequestId
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.fakes import FakeDevice
from tests.processes import marked, run_program, started
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import line_of, until

OPTIONS = {"quiet": True, "device": "cpu", "dtype": "float32", "kv_blocks": 128, "max_running_requests": 8}
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_new_tokens=400, ignore_eos=True)
QUESTION = [{"role": "user", "content": "one"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    model = make_tiny_model(folder, "smollm2")
    for seed, name in enumerate(("poet", "pirate")):
        make_adapter(folder / name, model, seed=seed)
    return write_byte_tokenizer(folder)


@pytest.fixture(scope="module")
def llm(folder) -> Iterator[LLM]:
    with LLM(folder, adapters={"poet": folder / "poet"}, **OPTIONS) as llm:
        yield llm


def open_requests(llm: LLM) -> set[RequestId]:
    """Of which the engine has not told the end."""
    return set(llm._service._promises._requests)


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rota-engine"]


# ── threads ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_threads_that_ask_at_the_same_time_each_get_their_own_answers(llm):
    prompts = [f"prompt {i}" for i in range(24)]
    alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]
    together = threading.Barrier(len(prompts))

    def ask(prompt: str) -> tuple[int, ...]:
        together.wait()
        return llm.generate(prompt, GREEDY)[0].token_ids

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(ask, prompts)) == alone


def test_a_short_answer_does_not_wait_for_a_long_one_of_another_call(llm):
    long = llm.stream("one", LONG)
    next(long)
    assert len(llm.generate("two", GREEDY)[0].token_ids) == 12
    assert open_requests(llm)
    long.close()


def test_more_prompts_than_rows_and_other_calls_beside_them_are_all_answered(llm):
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: llm.generate([f"{i} {j}" for j in range(40)], GREEDY), range(4)))
    assert [len(answer.token_ids) for call in answers for answer in call] == [12] * 160


def test_ctrl_c_in_a_call_that_waits_aborts_its_requests_and_the_next_call_is_answered(llm):
    def interrupt() -> None:
        assert until(lambda: bool(open_requests(llm)))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            thread.start()
            llm.generate(["one"] * 50, LONG)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)

    assert until(lambda: not open_requests(llm))
    assert len(llm.generate("one", GREEDY)[0].token_ids) == 12


# ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("asked", ["one", list(b"one"), QUESTION])
def test_the_pieces_of_a_stream_are_the_answer(llm, asked):
    pieces = list(llm.stream(asked, GREEDY, adapter="poet"))
    whole = (llm.chat if asked is QUESTION else llm.generate)(asked, GREEDY, adapter="poet")[0]

    assert "".join(piece.text for piece in pieces) == whole.text
    assert len(pieces) > 2
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_a_stop_string_ends_a_stream_before_it(llm):
    (whole,) = llm.generate("one", GREEDY)
    stop = whole.text[5:7]
    pieces = list(llm.stream("one", SamplingParams(temperature=0.0, max_new_tokens=400, ignore_eos=True, stop=stop)))

    assert "".join(piece.text for piece in pieces) == whole.text[: whole.text.index(stop)]
    assert pieces[-1].finish_reason == "stop"


def test_a_stream_that_is_left_aborts_its_request(llm):
    for piece in llm.stream("one", LONG):
        assert piece.finish_reason is None
        break
    assert until(lambda: not open_requests(llm))


def test_a_stream_of_two_prompts_is_refused_at_once(llm):
    with pytest.raises(RequestError, match="one prompt, not to 2; open one for each"):
        llm.stream(["one", "two"])


# ── asyncio ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_coroutines_that_ask_at_the_same_time_each_get_their_own_answers(llm):
    prompts = [f"prompt {i}" for i in range(24)]
    alone = [llm.generate(prompt, GREEDY) for prompt in prompts]

    async def ask_all() -> list[Any]:
        return await asyncio.gather(*(llm.agenerate(prompt, GREEDY) for prompt in prompts), llm.achat(QUESTION, GREEDY))

    *answers, chat = asyncio.run(ask_all())
    assert [texts(answer) for answer in answers] == [texts(answer) for answer in alone]
    assert texts(chat) == texts(llm.chat(QUESTION, GREEDY))


def texts(answers: list[Any]) -> list[str]:
    return [answer.text for answer in answers]


def test_coroutines_stream_beside_each_other(llm):
    async def said(prompt: str) -> str:
        return "".join([piece.text async for piece in llm.astream(prompt, GREEDY)])

    async def say_all() -> list[str]:
        return await asyncio.gather(said("one"), said("two"))

    assert asyncio.run(say_all()) == texts(llm.generate(["one", "two"], GREEDY))


def test_a_task_that_is_cancelled_and_a_stream_that_is_left_abort_their_requests(llm):
    async def leave() -> None:
        task = asyncio.create_task(llm.agenerate(["one"] * 9, LONG))
        while not open_requests(llm):
            await asyncio.sleep(0.001)  # until the thread that reads prompts has sent them
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async for _ in (stream := llm.astream("two", LONG)):
            break
        await stream.aclose()

    asyncio.run(leave())
    assert until(lambda: not open_requests(llm))


def test_an_error_reaches_the_coroutine_that_asked(llm):
    with pytest.raises(RequestError, match="Prompt 1: The prompt is too long: 600 tokens"):
        asyncio.run(llm.agenerate(["fine", "x" * 600], GREEDY))


# ── several answers ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_prompt_gets_as_many_answers_as_asked_and_they_stand_side_by_side(llm):
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, seed=3)
    ones, twos = llm.generate("one", params, n=3), llm.generate("two", params, n=3)
    both = llm.generate(["one", "two"], params, n=3)

    assert both == ones + twos or texts(both) == texts(ones + twos)
    assert len(set(texts(ones))) == 3
    assert ones[0].text == llm.generate("one", params)[0].text
    assert len(asyncio.run(llm.achat(QUESTION, params, n=2))) == 2


# ── closing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def asks(llm: LLM) -> dict[str, Callable[[], object]]:
    return {
        "generate": lambda: llm.generate("one", LONG),
        "chat": lambda: llm.chat(QUESTION, LONG),
        "stream": lambda: list(llm.stream("one", LONG)),
        "agenerate": lambda: asyncio.run(llm.agenerate("one", LONG)),
        "load_adapter": lambda: llm.load_adapter("late", "/nowhere"),
    }


def test_a_closed_llm_ends_the_calls_that_wait_and_says_that_it_is_closed(folder):
    with LLM(folder, **OPTIONS) as llm, ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(asks(llm)[name]) for name in ("generate", "chat", "stream", "agenerate")]
        assert until(lambda: len(open_requests(llm)) == 4)
        llm.close()
        for call in waiting:
            assert str(call.exception()) == "This LLM is closed; make another one."
    for ask in asks(llm).values():
        with pytest.raises(EngineDiedError, match="This LLM is closed; make another one"):
            ask()


def test_closing_returns_threads_and_processes_and_twice_is_as_good_as_once(folder, monkeypatch):
    monkeypatch.setenv("OF_THIS_TEST", mark := uuid4().hex)
    before = set(threading.enumerate())
    with LLM(folder, adapters={"poet": folder / "poet"}, **OPTIONS) as llm:
        llm.generate("one", GREEDY, adapter="poet")
        assert set(threading.enumerate()) > before
    llm.close()

    assert set(threading.enumerate()) <= before
    assert marked(mark) == []


def test_an_llm_that_nobody_holds_ends_by_itself(folder):
    before = set(threading.enumerate())
    llm = LLM(folder, **OPTIONS)
    forgotten = weakref.ref(llm)
    llm.generate("one", GREEDY)
    del llm
    gc.collect()

    assert forgotten() is None
    assert until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("wrong", [{"max_lora_rank": 2, "adapters": {"poet": "poet"}}, {"kv_blocks": 10**12}])
def test_a_start_that_fails_leaves_no_thread_and_no_process(folder, monkeypatch, wrong):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OF_THIS_TEST", mark := uuid4().hex)
    before = set(threading.enumerate())
    with pytest.raises((RotaError, RuntimeError, MemoryError)):
        LLM(folder, **{**OPTIONS, **wrong})
    gc.collect()
    assert until(lambda: set(threading.enumerate()) <= before)
    assert until(lambda: not marked(mark))


PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from rota import LLM, SamplingParams
llm = LLM(sys.argv[1], quiet=True, device="cpu", kv_blocks=64)
params = SamplingParams(temperature=0.0, max_new_tokens=400, ignore_eos=True)
stream = llm.stream("one", params)
next(stream)
print("speaks", flush=True)
"""


def test_a_program_that_never_closes_its_llm_ends_quietly_in_the_middle_of_an_answer(folder):
    done = run_program([sys.executable, "-c", PROGRAM, folder])
    assert done.stdout == "speaks\n"
    assert done.stderr == ""


def test_ctrl_c_ends_a_program_that_waits_for_an_answer(folder):
    program = PROGRAM + "while True: llm.generate('two', params)"
    with started([sys.executable, "-c", program, folder], stderr=-1) as running:
        line_of(running, "speaks")
        running.send_signal(signal.SIGINT)
        _, said = running.communicate()
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert running.returncode == -signal.SIGINT


# ── errors in the engine ──────────────────────────────────────────────────────────────────────────────────────────────


def test_an_error_in_the_engine_ends_every_call_that_waits_and_says_what_to_do(folder, monkeypatch, capsys):
    failing = threading.Event()

    def next_token(_: object) -> int:
        if failing.wait():
            raise ZeroDivisionError("a kernel went wrong")
        return 3

    monkeypatch.setattr("rota.llm.llm.build_device", lambda _: FakeDevice(next_token=next_token))
    llm = LLM(folder, **OPTIONS)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(asks(llm)[name]) for name in ("generate", "chat", "stream", "agenerate")]
        assert until(lambda: len(open_requests(llm)) == 4)
        failing.set()
        said = "The engine failed with ZeroDivisionError: a kernel went wrong. Make another LLM."
        assert [(type(call.exception()), str(call.exception())) for call in waiting] == [(EngineDiedError, said)] * 4
    with pytest.raises(EngineDiedError, match=r"a kernel went wrong\. Make another LLM"):
        llm.generate("one")
    assert "ZeroDivisionError" in capsys.readouterr().err
    llm.close()


# ── ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long("two ranks load torch twice, and twice again")
def test_an_llm_of_two_ranks_can_be_made_again_once_it_is_closed_and_not_before(folder, monkeypatch):
    monkeypatch.setenv("OF_THIS_TEST", mark := uuid4().hex)
    ranks = partial(LLM, folder, tensor_parallel_size=2, **OPTIONS)
    with ranks() as first:
        once = first.generate("one", GREEDY)
        with pytest.raises(ConfigError, match="close that LLM first"):
            ranks()
        assert first.generate("one", GREEDY) == once
    with ranks() as second:
        assert texts(second.generate("one", GREEDY)) == texts(once)
    assert until(lambda: not marked(mark))
