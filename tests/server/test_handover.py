"""Large bodies are read by threads and have time while they come; their connections are the event loop's again then."""

from __future__ import annotations

import errno
import socket
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
import uvicorn
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from rota.server.door.connection import BYTES_PER_S, BodyDeadline, BoundedConnection
from rota.server.door.handover import LEAST_BYTES, handover_of
from tests.waiting import TIMEOUT_S, until

BODY = bytes(range(256)) * (LEAST_BYTES // 64)  # of four times the least size
HEAD = b"PUT / HTTP/1.1\r\nHost: here\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)


class Patient(BoundedConnection):
    """Waits longer than a busy machine holds up a client."""

    head_s = body_s = read_s = TIMEOUT_S


class Hasty(Patient):
    """Waits half a second for the beginning of a body."""

    body_s = 0.5


class Keeper:
    """Keeps bodies in a file, and answers with how many bytes the threads have read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.threads = ThreadPoolExecutor(4)
        self.begun = threading.Event()
        self.endings: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            by_threads = await self._keep(Request(scope, receive))
        except BaseException as error:
            self.endings.append(type(error).__name__)
            by_threads = -1
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
        await send({"type": "http.response.body", "body": b"%9d" % by_threads})

    async def _keep(self, http: Request) -> int:
        by_threads = 0
        with self.path.open("wb") as file:
            async for chunk in http.stream():
                self.begun.set()
                if rest := handover_of(http.scope):
                    by_threads += await rest.write_to(file, chunk, self.threads)
                else:
                    file.write(chunk)
        return by_threads

    @property
    def is_idle(self) -> bool:
        """Whether no thread reads: all of them take part in something else."""
        together = threading.Barrier(5)
        for _ in range(4):
            self.threads.submit(together.wait, TIMEOUT_S)
        together.wait(TIMEOUT_S)
        return True


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    keeper = Keeper(tmp_path / "body")
    yield keeper
    keeper.threads.shutdown()


@contextmanager
def served(keeper: Keeper, kind: type[BoundedConnection]) -> Iterator[tuple[str, int]]:
    """The address of a server that stops afterwards, whatever is still under way."""
    config = uvicorn.Config(
        keeper, http=kind, ws="none", lifespan="off", log_level="critical", timeout_graceful_shutdown=0
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        yield listener.getsockname()
        server.should_exit = True
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "the server has not stopped"


@contextmanager
def connected(keeper: Keeper, kind: type[BoundedConnection] = Patient) -> Iterator[socket.socket]:
    with served(keeper, kind) as address, socket.create_connection(address, timeout=TIMEOUT_S) as client:
        yield client


def answer(client: socket.socket) -> int:
    """How much of the body the threads have read. Byte by byte: another answer may be right behind."""
    received = b""
    while len(received.partition(b"\r\n\r\n")[2]) < 9:
        data = client.recv(1)
        assert data, "the server closed the connection"
        received += data
    assert received.startswith(b"HTTP/1.1 200 OK")
    return int(received[-9:])


def test_threads_read_large_bodies_and_the_connection_serves_on(keeper):
    with connected(keeper) as client:
        for body in (BODY, b"small", BODY[::-1], b""):
            client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            by_threads = answer(client)
            assert keeper.path.read_bytes() == body
            assert (by_threads >= LEAST_BYTES) == (len(body) > LEAST_BYTES)


def test_a_request_right_behind_a_body_is_not_read_with_it(keeper):
    with connected(keeper) as client:
        client.sendall(HEAD + LENGTH + BODY + HEAD + b"Content-Length: 4\r\n\r\nnext")
        assert answer(client) >= LEAST_BYTES
        assert answer(client) == 0
    assert keeper.path.read_bytes() == b"next"


def test_a_body_that_waits_for_the_servers_word_gets_it(keeper):
    with connected(keeper) as client:
        client.sendall(HEAD + b"Expect: 100-continue\r\n" + LENGTH)
        assert client.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(BODY)
        answer(client)
    assert keeper.path.read_bytes() == BODY


def test_a_body_without_a_length_is_the_event_loops(keeper):
    with connected(keeper) as client:
        client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert answer(client) == 0
    assert keeper.path.read_bytes() == BODY


def test_a_server_without_files_to_open_reads_a_body_as_it_reads_small_ones(keeper, monkeypatch):
    def refuse(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with connected(keeper) as client, monkeypatch.context() as patched:
        patched.setattr("os.dup", refuse)
        client.sendall(HEAD + LENGTH + BODY)
        assert answer(client) == 0
    assert keeper.path.read_bytes() == BODY


def test_a_client_that_leaves_in_the_middle_frees_the_thread(keeper):
    with connected(keeper) as client:
        client.sendall(HEAD + LENGTH + BODY[: LEAST_BYTES // 2])
        assert keeper.begun.wait(TIMEOUT_S)
        client.close()
        assert until(lambda: keeper.endings == ["ClientDisconnect"])
        assert keeper.is_idle


def test_a_client_that_sends_too_slowly_is_told_and_frees_the_thread(keeper):
    with connected(keeper, Hasty) as client:
        client.sendall(HEAD + LENGTH + BODY[:100])
        received = b""
        while data := client.recv(65536):
            received += data
        assert b" 408 " in received.partition(b"\r\n")[0]
        assert keeper.is_idle


def test_a_server_that_stops_does_not_wait_for_a_body(keeper):
    with socket.socket() as client:
        with served(keeper, Patient) as address:
            client.connect(address)
            client.sendall(HEAD + LENGTH + BODY[: LEAST_BYTES // 2])
            assert keeper.begun.wait(TIMEOUT_S)
        assert keeper.is_idle, "a thread still reads"


def test_a_disk_without_room_is_told_after_the_body_and_the_connection_serves_on(keeper, tmp_path):
    keeper.path = Path("/dev/full")
    with connected(keeper) as client:
        client.sendall(HEAD + LENGTH + BODY)
        answer(client)
        assert keeper.endings == ["OSError"]
        keeper.path = tmp_path / "body"
        client.sendall(HEAD + LENGTH + BODY)
        assert answer(client) >= LEAST_BYTES
    assert keeper.path.read_bytes() == BODY


# ── bodies that rest ──────────────────────────────────────────────────────────────────────────────────────────────────


class Clock:
    """An event loop with one timer, and a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: tuple[float, Callable[[], None]] | None = None

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._due = (self.now + delay_s, call)

    def pass_by(self, until: float) -> None:
        while self._due and self._due[0] <= until:
            (self.now, call), self._due = self._due, None
            call()
        self.now = until


class Arriving:
    def __init__(self, is_answered: bool = False) -> None:
        self.clock, self.late_at = Clock(), list[float]()
        self.is_held = False
        self.deadline = BodyDeadline(
            cast(AbstractEventLoop, self.clock),
            30.0,
            lambda: is_answered,
            lambda: self.is_held,
            lambda: self.late_at.append(self.clock.now),
        )
        self.deadline.start()


def test_a_body_that_rests_expires_however_much_of_it_came():
    body = Arriving()
    body.deadline.add(1000 * BYTES_PER_S)
    body.clock.pass_by(1000.0)
    assert body.late_at == [60.0]


@pytest.mark.parametrize(("bytes_per_s", "is_late"), [(BYTES_PER_S, False), (BYTES_PER_S // 2, True)])
def test_a_body_that_comes_steadily_has_time_unless_it_is_too_slow(bytes_per_s, is_late):
    body = Arriving()
    for second in range(1, 1000):
        body.deadline.add(bytes_per_s)
        body.clock.pass_by(float(second))
    assert bool(body.late_at) == is_late


def test_bytes_that_come_after_the_answer_give_no_time_and_a_server_that_does_not_read_takes_none():
    answered, held = Arriving(is_answered=True), Arriving()
    answered.deadline.add(1000 * BYTES_PER_S)
    answered.clock.pass_by(100.0)
    assert answered.late_at == [30.0]
    held.is_held = True
    held.clock.pass_by(100.0)
    assert not held.late_at
