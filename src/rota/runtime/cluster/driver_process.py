"""The front's handle to its driver: a program that ends with the front, and a line to it."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing.connection import Pipe

from rota.runtime.children import deaf_children
from rota.runtime.cluster.joining import in_one_line
from rota.runtime.cluster.records import Orders, Told
from rota.runtime.lifeline import tied

# A driver that has closed its line ends in a moment.
_END_S = 5.0


class DriverProcess:
    """The thread that starts it must live as long as the driver, which Linux kills with that thread."""

    def __init__(self, address: str) -> None:
        self._line, theirs = Pipe()
        # Ray's own lines are not the server's.
        self._words = tempfile.TemporaryFile()  # noqa: SIM115, closed by `close`
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
        environ = os.environ | {"PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"}
        self._orders: queue.SimpleQueue[Orders | None] = queue.SimpleQueue()
        command = [sys.executable, "-m", "rota.runtime.cluster", str(theirs.fileno()), address]
        with theirs, deaf_children():
            self._process = subprocess.Popen(
                tied(command),
                env=environ,
                cwd="/",  # Ray would have the engines look for modules in the front's folder
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=self._words,
                pass_fds=[theirs.fileno()],
            )
        # A driver that waits for the cluster's head reads nothing meanwhile, and no thread here may wait for that.
        self._sender = threading.Thread(target=self._send_all, name="rota-orders", daemon=True)
        self._sender.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, record: Orders) -> None:
        """From any thread, without waiting. A driver that is gone is heard of by `hear`."""
        self._orders.put(record)

    def _send_all(self) -> None:
        with suppress(OSError):
            for record in iter(self._orders.get, None):
                self._line.send(record)

    def hear(self) -> Told | None:
        """Wait for what the driver tells; None once it is gone."""
        try:
            told: Told = self._line.recv()
        except (EOFError, OSError):
            return None
        return told

    def last_words(self) -> str:
        """What the driver wrote last, in one line, for a reason that names no other."""
        size = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, size - 2000))
        lines = self._words.read().decode("utf-8", "replace").splitlines()
        return in_one_line(next((line for line in reversed(lines) if line.strip()), ""))

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """After the last word was heard."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._orders.put(None)
        self._sender.join()
        self._line.close()
        self._words.close()
