"""The server under test is `rota serve` in processes of its own, started again whenever a fault has ended it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field

from rota.runtime.lifeline import tied

from .asks import Ask
from .endings import Kind
from .exchange import exchange
from .processes import children_of, engines_of
from .site import Site

# A start on a quiet machine takes four seconds.
START_S = 120.0
SILENCE_S = 5.0
STOP_S = 90.0
_LOOK_S = 0.05
_ROTA = [sys.executable, "-c", "from rota.cli import main; main()"]
OPTIONS = {
    "max-loras-per-batch": 3,
    "max-lora-rank": 16,
    # Few blocks: a cache that is not yet used up would look like memory that grows.
    "kv-blocks": 512,
    "max-running-requests": 8,
    "max-queued-requests": 24,
    "max-body-mb": 2,
    "drain-timeout": 5,
    "stream-keep-alive": 2,
    "log-format": "json",
    "engine-silence-s": SILENCE_S,
}


class NotServingError(Exception):
    """The server did not start, or does not answer any more."""


@dataclass(slots=True)
class Served:
    """`start` and the faults change which process it is; the port stays."""

    site: Site
    replicas: int = 1
    port: int = field(default_factory=lambda: _free_port())
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None, "the server was started"
        return self.process.pid

    @property
    def engines(self) -> list[int]:
        """Their processes; fewer than there are replicas while one of them starts."""
        return engines_of(self.pid)

    @property
    def pids(self) -> list[int]:
        return [self.pid, *children_of(self.pid)]

    @property
    def exit_code(self) -> int | None:
        return self.process.poll() if self.process else None

    async def start(self) -> None:
        """Start it and wait until it is ready."""
        self._launch()
        await self.wait_until_ready()

    async def wait_until_ready(self) -> None:
        """Raises NotServingError if it ends, or is not ready in time."""
        ends_at = time.monotonic() + START_S
        while time.monotonic() < ends_at:
            if self.exit_code is not None:
                raise NotServingError(f"the server ended with {self.exit_code}: {self.last_lines(5):.600}")
            ending = await exchange(self.port, Ask("/health"), deadline_s=10.0)
            if ending.kind is Kind.FINISHED and self.engines:
                return
            await asyncio.sleep(_LOOK_S)  # between two looks
        raise NotServingError(f"the server was not ready within {START_S:g} seconds: {self.last_lines(5):.600}")

    async def wait_for_end(self, within_s: float = STOP_S) -> int:
        """The exit code. A server that does not end is killed, and the code says so."""
        ends_at = time.monotonic() + within_s
        while self.exit_code is None:
            if time.monotonic() > ends_at:
                self.kill()
                raise NotServingError(f"the server did not end within {within_s:g} seconds")
            await asyncio.sleep(_LOOK_S)  # between two looks
        assert self.exit_code is not None, "the loop has ended"
        return self.exit_code

    def send(self, number: signal.Signals) -> None:
        if self.process:
            self.process.send_signal(number)

    def kill(self) -> None:
        """End it at once; the engines' processes end with it."""
        if self.process:
            self.process.kill()
            self.process.wait()

    def last_lines(self, count: int) -> str:
        with suppress(OSError):
            return "\n".join(self.site.log.read_text("utf-8", "replace").splitlines()[-count:])
        return ""

    def _launch(self) -> None:
        flags = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
        flags += ["--port", str(self.port), "--api-key-file", str(self.site.key_file)]
        flags += ["--adapter-root", str(self.site.root), "--data-parallel-size", str(self.replicas)]
        environment = os.environ | {"TMPDIR": str(self.site.temporary)}
        with self.site.log.open("ab") as log:
            self.process = subprocess.Popen(tied([*_ROTA, "serve", *flags]), stdout=log, stderr=log, env=environment)
        self.starts += 1


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
