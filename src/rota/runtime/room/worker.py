"""What runs in a process of the room: it has its tools at hand, and does each job in a copy of itself.

A copy is made by `fork` for the first job, and again after one that had to be ended: a start would take a second.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rota.runtime.children import freeze_heap
from rota.runtime.lifeline import die_with
from rota.runtime.room.confinement import give_way, limit_memory, lock_in
from rota.runtime.room.job import JobOutcome, JobReply, Kind, Prepare

# A copy that still holds this much more after a job has kept memory that nothing will need again.
_KEPT_BYTES = 1 << 29
# The first byte of a copy's answer: whether it lives on.
_GOES_ON, _IS_LAST = b"+", b"-"


def main(descriptor: int, parent: int) -> None:
    """The first message says what to prepare. The answer is empty, or why nothing can be done here."""
    die_with(parent)
    give_way()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one text at a time needs no threads, and each reserves memory
    connection = Connection(descriptor)
    try:
        sys.path += pickle.loads(connection.recv_bytes())  # behind Python's own folders
        prepare, argument = pickle.loads(connection.recv_bytes())
        tools = _prepared(prepare, argument)
        connection.send_bytes(b"")
        copy = _Copy(tools, connection)
        while True:
            kind: Kind
            kind, count = pickle.loads(connection.recv_bytes())
            reply = copy.reply(kind, [connection.recv_bytes() for _ in range(count)])
            connection.send_bytes(reply.outcome.value.encode())
            connection.send_bytes(reply.content)
    except (EOFError, ConnectionError):
        os._exit(0)  # the server has gone


def _prepared(prepare: Prepare, argument: Any) -> Any:
    tools = prepare(argument)
    lock_in()
    freeze_heap()  # else a collection in a copy would write to all that it shares
    return tools


class _Copy:
    def __init__(self, tools: Any, inherited: Connection) -> None:
        """`inherited` belongs to this process alone: a copy closes it, else it would hide this one's end."""
        self._tools, self._inherited = tools, inherited
        self._connection: Connection | None = None
        self._pid = 0

    def reply(self, kind: Kind, parts: list[bytes]) -> JobReply:
        """Ends the copy that takes too long."""
        connection = self._connection or self._forked()
        try:
            connection.send_bytes(pickle.dumps((kind, len(parts))))
            for part in parts:
                connection.send_bytes(part)
            if not connection.poll(kind.wall_s):
                self._ended()
                return JobReply(JobOutcome.OVERDUE)
            first, outcome = connection.recv_bytes(), JobOutcome(connection.recv_bytes().decode())
            reply = JobReply(outcome, connection.recv_bytes())
        except (EOFError, OSError):
            return JobReply(JobOutcome.TOO_LONG if self._ended() == signal.SIGPROF else JobOutcome.DIED)
        if first == _IS_LAST:
            self._ended()
        return reply

    def _forked(self) -> Connection:
        self._connection, theirs = Pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            self._inherited.close()
            self._connection.close()
            _serve(theirs, self._tools, parent)
        theirs.close()
        return self._connection

    def _ended(self) -> int:
        """The signal that ended the copy, which is SIGKILL if it still ran."""
        assert self._connection, "it was made"
        self._connection.close()
        self._connection = None
        os.kill(self._pid, signal.SIGKILL)
        return os.WTERMSIG(os.waitpid(self._pid, 0)[1])


def _serve(connection: Connection, tools: Any, parent: int) -> None:
    """What a copy does until it ends; never returns."""
    try:
        die_with(parent)
        had = _resident_bytes()
        while True:
            kind: Kind
            kind, count = pickle.loads(connection.recv_bytes())
            parts = [connection.recv_bytes() for _ in range(count)]
            reply = _done(kind, tools, parts)
            is_last = reply.outcome is not JobOutcome.DONE or _resident_bytes() > had + _KEPT_BYTES
            connection.send_bytes(_IS_LAST if is_last else _GOES_ON)
            connection.send_bytes(reply.outcome.value.encode())
            connection.send_bytes(reply.content)
    except (EOFError, ConnectionError):
        os._exit(0)
    finally:
        os._exit(1)


def _done(kind: Kind, tools: Any, parts: list[bytes]) -> JobReply:
    limit_memory(kind.memory_bytes)
    # The kernel ends a copy that computes for too long, also within a library.
    signal.setitimer(signal.ITIMER_PROF, kind.cpu_s or 0)
    try:
        return JobReply(JobOutcome.DONE, kind.work(tools, *parts))
    except MemoryError:
        return JobReply(JobOutcome.TOO_LARGE)
    except Exception:  # the border of a process: its server answers with a 500 and logs the traceback
        return JobReply(JobOutcome.FAILED, traceback.format_exc().encode())
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _resident_bytes() -> int:
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
