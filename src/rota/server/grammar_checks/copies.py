"""A check runs in a copy of a process that has read the tokenizer, so a copy that must be ended is replaced at once."""

from __future__ import annotations

import os
import signal
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from rota.core.grammar import Grammar
from rota.grammar.check import problem
from rota.grammar.vocabulary import Vocabulary
from rota.runtime.lifeline import die_with
from rota.server.grammar_checks.verdict import DIED, Verdict, overdue

# An engine reads the grammar again, so a grammar may not cost it much.
MOST_CPU_S = 0.25
# On a busy machine a check waits for its turn. The client shall have an answer within a second.
LIMIT_S = 0.8
TOO_SLOW = Verdict(f"it takes more than {MOST_CPU_S:g} seconds of processor time to read. Make it smaller.")


class Copy:
    """Made by `fork` for the first check, and again after one that had to be ended: a start would take a second."""

    def __init__(self, vocabulary: Vocabulary, inherited: Connection) -> None:
        """`inherited` belongs to this process alone: a copy closes it, else it would hide this one's end."""
        self._vocabulary, self._inherited = vocabulary, inherited
        self._connection: Connection | None = None
        self._pid = 0

    def verdict(self, text: bytes) -> Verdict:
        """Whether a grammar can be followed. Ends the copy that takes too long."""
        connection = self._connection or self._forked()
        try:
            connection.send_bytes(text)
            if connection.poll(LIMIT_S):
                return Verdict(connection.recv_bytes().decode())
        except (EOFError, OSError):
            return TOO_SLOW if self._ended() == signal.SIGPROF else DIED
        self._ended()
        return overdue(LIMIT_S)

    def _forked(self) -> Connection:
        self._connection, theirs = Pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            self._inherited.close()
            self._connection.close()
            _serve(theirs, self._vocabulary, parent)
        theirs.close()
        return self._connection

    def _ended(self) -> int:
        """The signal that ended the copy, which is SIGKILL if it still ran."""
        assert self._connection, "it was made"
        self._connection.close()
        self._connection = None
        os.kill(self._pid, signal.SIGKILL)
        return os.WTERMSIG(os.waitpid(self._pid, 0)[1])


def _serve(connection: Connection, vocabulary: Vocabulary, parent: int) -> None:
    """What a copy does until it ends; never returns."""
    try:
        die_with(parent)
        while True:
            text = connection.recv_bytes().decode()
            # The kernel ends a copy that computes for too long, also within the library.
            signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
            found = problem(vocabulary, Grammar(text))
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(found.encode())
    except (EOFError, ConnectionError):
        os._exit(0)
    finally:
        os._exit(1)
