"""Large bodies are read in worker processes: with the same result, within bounds, and fairly between keys."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rota.core.errors import FaultCode, RequestError
from rota.server.access.keys import ANYONE, Key
from rota.server.native.call import read_generate
from rota.server.openai.chat_fields import read_chat
from rota.server.openai.completion_fields import read_completion
from rota.server.openai.tokenize_fields import read_detokenize, read_tokenize
from rota.server.prompts import TextLimits, Texts
from rota.server.reading import LARGE_BYTES, LARGE_OBJECTS, is_large, read
from rota.server.text_workers.pool import TextWorkers
from rota.server.text_workers.waiting import Bounds, Waiting
from rota.text.tokenizer import Tokenizer
from tests.processes import is_alive, started
from tests.server.jobs import echo, fails, hangs, takes_memory
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import PATIENCE_S, line_of, until

ACME, OTHER = Key("acme"), Key("other")
LIMITS = TextLimits(max_sequence_tokens=200_000)
LONG = "a long text " * 4000
TOOLS = [{"type": "function", "function": {"name": "weather", "strict": True}}]
MANY = [{"role": "user", "content": "é"}] * 3000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("model"))


def run(folder: Path, test: Callable[[TextWorkers], Awaitable[None]], **options: Any) -> None:
    """Runs a test on an event loop, with workers that end with it."""

    async def body() -> None:
        workers = TextWorkers(Tokenizer(folder), **options)
        try:
            await asyncio.wait_for(test(workers), PATIENCE_S)
        finally:
            pids = workers.pids
            await workers.close()
            assert not any(map(is_alive, pids))

    asyncio.run(body())


async def seen(path: Path) -> None:
    """Waits until a job has touched a file."""
    assert await asyncio.to_thread(until, path.exists)


def test_a_worker_gives_what_the_server_itself_would_give(folder: Path):
    bodies: list[tuple[Callable[[Texts, bytes], Any], dict[str, Any]]] = [
        (read_chat, {"messages": MANY, "n": 2, "stop": ["x"], "logprobs": True, "metadata": {"a": "b"}}),
        (read_chat, {"messages": MANY, "tools": TOOLS, "tool_choice": "required"}),
        (read_completion, {"prompt": [LONG, "b"], "echo": True, "logprobs": 1, "stream": True}),
        (read_completion, {"prompt": [[97, 98] * 9000, [99]], "echo": True, "model": "x"}),
        (read_generate, {"text": [LONG, "b"], "rid": ["one", "two"], "lora_path": [None, "x"], "return_logprob": True}),
        (read_generate, {"input_ids": [97] * 20_000, "rid": "mine", "sampling_params": {"n": 2}}),
        (read_generate, {"text": LONG, "rid": "mine", "sampling_params": {"n": 0}}),
        (read_tokenize, {"messages": MANY, "return_token_strs": True}),
        (read_tokenize, {"prompt": LONG, "model": "x"}),
        (read_detokenize, {"tokens": [0xC3, 0xA9, 97] * 5000}),
    ]
    texts = Texts(Tokenizer(folder), LIMITS)

    async def same(workers: TextWorkers) -> None:
        for work, fields in bodies:
            raw = json.dumps(fields).encode()
            assert is_large(raw)
            assert await read(texts, workers, ANYONE, work, raw) == work(texts, raw)

    run(folder, same)


def test_a_worker_refuses_what_the_server_itself_would_refuse(folder: Path):
    texts = Texts(Tokenizer(folder), LIMITS)
    bodies: list[tuple[Callable[[Texts, bytes], Any], dict[str, Any]]] = [
        (read_chat, {"messages": [*MANY, {"role": "nurse", "content": ""}]}),
        (read_completion, {"prompt": LONG * 10}),
        (read_completion, {"prompt": [[97], [300] * 20_000]}),
        (read_generate, {"text": LONG, "colour": "red"}),
        (read_detokenize, {"tokens": [97] * 20_000 + [300]}),
    ]

    async def same(workers: TextWorkers) -> None:
        for work, fields in bodies:
            raw = json.dumps(fields).encode()
            with pytest.raises(RequestError) as here:
                work(texts, raw)
            with pytest.raises(RequestError) as there:
                await read(texts, workers, ANYONE, work, raw)
            assert there.value.fault == here.value.fault

    run(folder, same)


def test_a_small_body_starts_no_process_and_a_large_one_a_process_that_gives_way_to_the_engine(folder: Path):
    texts = Texts(Tokenizer(folder))

    async def test(workers: TextWorkers) -> None:
        for raw in (b"{}", b"x" * LARGE_BYTES, b"{" * LARGE_OBJECTS):
            assert await read(texts, workers, ACME, echo, raw) == (os.getpid(), raw)
        assert workers.pids == []
        for raw in (b"x" * (LARGE_BYTES + 1), b"{" * (LARGE_OBJECTS + 1)):
            assert await read(texts, workers, ACME, echo, raw) == (workers.pids[0], raw)
        await gives_way_and_leaves_ctrl_c_to_the_server(workers)

    run(folder, test)


async def gives_way_and_leaves_ctrl_c_to_the_server(workers: TextWorkers) -> None:
    (pid,) = workers.pids
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, own + 5)
    os.kill(pid, signal.SIGINT)
    assert await workers.run(ACME, echo, LIMITS, b"more") == (pid, b"more")


def test_a_worker_that_dies_is_replaced_and_its_job_is_answered(folder: Path, tmp_path: Path):
    async def test(workers: TextWorkers) -> None:
        first, _ = await workers.run(ACME, echo, LIMITS, b"")
        job = asyncio.create_task(workers.run(ACME, hangs, LIMITS, str(tmp_path / "begun").encode()))
        await seen(tmp_path / "begun")
        next_job = asyncio.create_task(workers.run(ACME, echo, LIMITS, b"next"))
        os.kill(first, signal.SIGKILL)
        with pytest.raises(RequestError, match="The process that read the body died; try again") as caught:
            await job
        assert caught.value.fault.code is FaultCode.TEXT_WORKER_DIED
        second, said = await next_job
        assert (said, second != first) == (b"next", True)

    run(folder, test)


def test_a_job_that_does_not_end_is_ended(folder: Path, tmp_path: Path):
    async def test(workers: TextWorkers) -> None:
        with pytest.raises(RequestError, match=r"took longer than 2 seconds; send a smaller body") as caught:
            await workers.run(ACME, hangs, LIMITS, str(tmp_path / "begun").encode())
        assert caught.value.fault.code is FaultCode.BODY_TOO_LARGE
        assert workers.pids == []

    run(folder, test, job_s=2.0)


def test_a_job_that_takes_too_much_memory_is_refused_and_a_bug_in_one_is_told_with_its_traceback(folder: Path):
    async def test(workers: TextWorkers) -> None:
        with pytest.raises(RequestError, match="took too much memory; send a smaller body"):
            await workers.run(ACME, takes_memory, LIMITS, b"%d" % 2**33)
        assert await workers.run(ACME, takes_memory, LIMITS, b"%d" % 2**20) == 2**20
        with pytest.raises(RuntimeError, match=r"(?s)a text worker failed.*ZeroDivisionError: oh"):
            await workers.run(ACME, fails, LIMITS, b"oh")

    run(folder, test)


def test_one_key_leaves_a_worker_to_the_others(folder: Path, tmp_path: Path):
    async def test(workers: TextWorkers) -> None:
        jobs = [
            asyncio.create_task(workers.run(ACME, hangs, LIMITS, str(tmp_path / f"begun{index}").encode()))
            for index in range(3)
        ]
        await seen(tmp_path / "begun0")
        _, said = await workers.run(OTHER, echo, LIMITS, b"at once")
        assert said == b"at once"
        assert not (tmp_path / "begun1").exists()
        await workers.close()
        for outcome in await asyncio.gather(*jobs, return_exceptions=True):
            assert isinstance(outcome, RequestError)
            assert outcome.fault.code is FaultCode.STOPPING

    run(folder, test)


def test_too_many_large_bodies_of_a_key_are_refused_for_a_while(folder: Path, tmp_path: Path):
    async def test(workers: TextWorkers) -> None:
        running = asyncio.create_task(workers.run(ACME, hangs, LIMITS, str(tmp_path / "begun").encode()))
        await seen(tmp_path / "begun")
        waiting = [asyncio.create_task(workers.run(ACME, echo, LIMITS, b"abc")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="Too many large bodies wait") as caught:
            await workers.run(ACME, echo, LIMITS, b"abc")
        assert caught.value.fault.code is FaultCode.QUEUE_FULL
        assert getattr(caught.value, "retry_after_s", None) == 1
        await workers.run(OTHER, echo, LIMITS, b"abc")
        await workers.close()
        await asyncio.gather(running, *waiting, return_exceptions=True)

    run(folder, test, of_key=Bounds(jobs=2, size=100))


class Item:
    def __init__(self, key: str, size: int = 1) -> None:
        self.key, self.size = key, size


def test_keys_take_turns():
    waiting: Waiting[Item] = Waiting(lambda _: 9, Bounds(9, 9), Bounds(9, 9))
    for key in "aaabbc":
        waiting.add(Item(key))

    assert [job.key for job in iter(waiting.take, None)] == ["a", "b", "c", "a", "b", "a"]


def test_a_key_with_enough_running_jobs_lets_others_go_first():
    waiting: Waiting[Item] = Waiting(lambda _: 1, Bounds(9, 9), Bounds(9, 9))
    for key in "aab":
        waiting.add(Item(key))

    assert [job.key for job in iter(waiting.take, None)] == ["a", "b"]
    waiting.finished("a")
    assert [job.key for job in iter(waiting.take, None)] == ["a"]


@pytest.mark.parametrize(
    ("of_key", "of_all", "size", "has_room"),
    [
        (Bounds(3, 100), Bounds(4, 100), 1, True),
        (Bounds(2, 100), Bounds(4, 100), 1, False),
        (Bounds(3, 20), Bounds(4, 100), 1, False),
        (Bounds(3, 100), Bounds(3, 100), 1, False),
        (Bounds(3, 100), Bounds(4, 30), 1, False),
    ],
)
def test_jobs_wait_within_bounds_but_the_first_of_a_key_always_may(
    of_key: Bounds, of_all: Bounds, size: int, has_room: bool
):
    waiting: Waiting[Item] = Waiting(lambda _: 1, of_key, of_all)
    for key in "aab":
        waiting.add(Item(key, 10))

    assert waiting.has_room("a", size) is has_room
    assert waiting.has_room("c", 10**9)


PARENT = """
import asyncio, sys
from rota.server.prompts import TextLimits
from rota.server.access.keys import ANYONE
from rota.server.text_workers.pool import TextWorkers
from rota.text.tokenizer import Tokenizer
from tests.server.jobs import echo
from tests.waiting import hang
async def main():
    print(*await TextWorkers(Tokenizer(sys.argv[1])).run(ANYONE, echo, TextLimits(), b""), flush=True)
    if len(sys.argv) < 3:
        hang()
if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_worker_dies_with_its_server(folder: Path, tmp_path: Path):
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with started([sys.executable, tmp_path / "parent.py", folder], env=environment) as parent:
        worker = int(line_of(parent).split()[0])
        assert is_alive(worker)
        parent.kill()
        assert until(lambda: not is_alive(worker))


def test_a_server_that_ends_without_a_word_does_not_wait_for_its_worker(folder: Path, tmp_path: Path):
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with started([sys.executable, tmp_path / "parent.py", folder, "and end"], env=environment) as parent:
        worker = int(line_of(parent).split()[0])
        assert parent.wait(PATIENCE_S) == 0
        assert until(lambda: not is_alive(worker))
