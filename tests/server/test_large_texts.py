"""Large bodies are read in the reading room: with the same result, within bounds, and fairly between keys."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rota.core.errors import FaultCode, RequestError
from rota.runtime.room.job import QueueBounds
from rota.server.access.keys import ANYONE, Key
from rota.server.calls.prompts import TextLimits, Texts
from rota.server.calls.reading_room import LARGE_BYTES, LARGE_OBJECTS, TEXT, ReadingRoom, is_large, read
from rota.server.native.call import read_generate
from rota.server.openai.chat_fields import read_chat
from rota.server.openai.completions import read_completion
from rota.server.openai.tokenize_routes import read_detokenize, read_tokenize
from rota.text.tokenizer import Tokenizer
from tests.processes import is_alive, started
from tests.server.jobs import echo, fails, hangs, takes_memory
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, line_of, until

ACME, OTHER = Key("acme"), Key("other")
LIMITS = TextLimits(max_sequence_tokens=200_000)
LONG = "a long text " * 4000
TOOLS = [{"type": "function", "function": {"name": "weather", "strict": True}}]
MANY = [{"role": "user", "content": "é"}] * 3000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("model"))


def run(folder: Path, test: Callable[[ReadingRoom], Awaitable[None]], **options: Any) -> None:
    """Runs a test on an event loop, with workers that end with it."""

    async def body() -> None:
        room = ReadingRoom(folder, has_grammars=False, **options)
        try:
            await asyncio.wait_for(test(room), TIMEOUT_S)
        finally:
            pids = room.pids
            await room.close()
            assert not any(map(is_alive, pids))

    asyncio.run(body())


def pipe(path: Path) -> bytes:
    """A pipe for a job that hangs."""
    os.mkfifo(path)
    return str(path).encode()


async def begun(path: Path) -> None:
    """Waits until a job reads from the pipe. It goes on reading: nobody closes the other end."""
    await asyncio.to_thread(os.open, path, os.O_WRONLY)


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
    tokenizer = Tokenizer(folder)

    async def same(room: ReadingRoom) -> None:
        for work, fields in bodies:
            raw = json.dumps(fields).encode()
            assert is_large(raw)
            assert await read(Texts(tokenizer, LIMITS), room, ANYONE, work, raw) == work(Texts(tokenizer, LIMITS), raw)

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

    async def same(room: ReadingRoom) -> None:
        for work, fields in bodies:
            raw = json.dumps(fields).encode()
            with pytest.raises(RequestError) as here:
                work(texts, raw)
            with pytest.raises(RequestError) as there:
                await read(texts, room, ANYONE, work, raw)
            assert there.value.fault == here.value.fault

    run(folder, same)


def test_a_small_body_starts_no_process_and_a_large_one_a_process_that_gives_way_to_the_engine(folder: Path):
    texts = Texts(Tokenizer(folder))

    async def test(room: ReadingRoom) -> None:
        for raw in (b"{}", b"x" * LARGE_BYTES, b"{" * LARGE_OBJECTS):
            assert await read(texts, room, ACME, echo, raw) == (os.getppid(), raw)
        assert room.pids == []
        for raw in (b"x" * (LARGE_BYTES + 1), b"{" * (LARGE_OBJECTS + 1)):
            assert await read(texts, room, ACME, echo, raw) == (room.pids[0], raw)
        await gives_way_and_leaves_ctrl_c_to_the_server(room)

    run(folder, test)


async def gives_way_and_leaves_ctrl_c_to_the_server(room: ReadingRoom) -> None:
    (pid,) = room.pids
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, own + 5)
    os.kill(pid, signal.SIGINT)
    assert await room.read(ACME, echo, LIMITS, b"more") == (pid, b"more")


def test_a_worker_that_dies_is_replaced_and_its_job_is_answered(folder: Path, tmp_path: Path):
    async def test(room: ReadingRoom) -> None:
        first, _ = await room.read(ACME, echo, LIMITS, b"")
        job = asyncio.create_task(room.read(ACME, hangs, LIMITS, pipe(tmp_path / "pipe")))
        await begun(tmp_path / "pipe")
        next_job = asyncio.create_task(room.read(ACME, echo, LIMITS, b"next"))
        os.kill(first, signal.SIGKILL)
        with pytest.raises(RequestError, match="The process that read the body died; try again") as caught:
            await job
        assert caught.value.fault.code is FaultCode.TEXT_WORKER_DIED
        second, said = await next_job
        assert (said, second != first) == (b"next", True)

    run(folder, test)


def test_a_job_that_does_not_end_is_ended(folder: Path, tmp_path: Path):
    async def test(room: ReadingRoom) -> None:
        with pytest.raises(RequestError, match=r"took longer than 2 seconds; send a smaller body") as caught:
            await room.read(ACME, hangs, LIMITS, pipe(tmp_path / "pipe"))
        assert caught.value.fault.code is FaultCode.BODY_TOO_LARGE
        assert (await room.read(ACME, echo, LIMITS, b""))[0] == room.pids[0]

    run(folder, test, text=replace(TEXT, wall_s=2.0))


def test_a_job_that_takes_too_much_memory_is_refused_and_a_bug_in_one_is_told_with_its_traceback(folder: Path):
    async def test(room: ReadingRoom) -> None:
        with pytest.raises(RequestError, match="took too much memory; send a smaller body"):
            await room.read(ACME, takes_memory, LIMITS, b"%d" % 2**33)
        assert await room.read(ACME, takes_memory, LIMITS, b"%d" % 2**20) == 2**20
        with pytest.raises(RuntimeError, match=r"(?s)a job of the reading room failed.*ZeroDivisionError: oh"):
            await room.read(ACME, fails, LIMITS, b"oh")

    run(folder, test)


def test_one_key_leaves_a_worker_to_the_others(folder: Path, tmp_path: Path):
    async def test(room: ReadingRoom) -> None:
        jobs = [
            asyncio.create_task(room.read(ACME, hangs, LIMITS, pipe(tmp_path / f"pipe{index}"))) for index in range(3)
        ]
        await begun(tmp_path / "pipe0")
        _, said = await room.read(OTHER, echo, LIMITS, b"at once")
        assert said == b"at once"
        with pytest.raises(OSError, match="No such device or address"):  # nobody reads
            os.open(tmp_path / "pipe1", os.O_WRONLY | os.O_NONBLOCK)
        await room.close()
        for outcome in await asyncio.gather(*jobs, return_exceptions=True):
            assert isinstance(outcome, RequestError)
            assert outcome.fault.code is FaultCode.STOPPING

    run(folder, test)


def test_too_many_large_bodies_of_a_key_are_refused_for_a_while(folder: Path, tmp_path: Path):
    async def test(room: ReadingRoom) -> None:
        running = asyncio.create_task(room.read(ACME, hangs, LIMITS, pipe(tmp_path / "pipe")))
        await begun(tmp_path / "pipe")
        waiting = [asyncio.create_task(room.read(ACME, echo, LIMITS, b"abc")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="Too many large bodies wait") as caught:
            await room.read(ACME, echo, LIMITS, b"abc")
        assert caught.value.fault.code is FaultCode.QUEUE_FULL
        assert getattr(caught.value, "retry_after_s", None) == 1
        await room.read(OTHER, echo, LIMITS, b"abc")
        await room.close()
        await asyncio.gather(running, *waiting, return_exceptions=True)

    run(folder, test, text=replace(TEXT, of_key=QueueBounds(jobs=2, size=1000)))


PARENT = """
import asyncio, sys
from pathlib import Path
from rota.server.calls.prompts import TextLimits
from rota.server.access.keys import ANYONE
from rota.server.calls.reading_room import ReadingRoom
from tests.server.jobs import echo
from tests.waiting import hang
async def main():
    print(*await ReadingRoom(Path(sys.argv[1]), False).read(ANYONE, echo, TextLimits(), b""), flush=True)
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
        assert parent.wait(TIMEOUT_S) == 0
        assert until(lambda: not is_alive(worker))
