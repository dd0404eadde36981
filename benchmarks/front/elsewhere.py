"""This machine plays another machine: an invited engine beside its front, with the guarded line between them."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

import zmq

from rota.core.config import EngineConfig
from rota.runtime.cluster.records import Invitation, Joined, OnJoined
from rota.runtime.cluster.remote_engine import RemoteEngine, run_invited
from rota.runtime.service import BuildDevice

HOST = "127.0.0.1"


class Beside:
    """A thread of this process runs the engine's process, and sleeps until that ends."""

    ending, waiting, is_refused = "", "", False

    def __init__(self, build_device: BuildDevice, config: EngineConfig) -> None:
        self._what = (build_device, config)
        self.exitcode: int | None = None
        self.sentinel, self._embed_head = os.pipe()
        self._joined: Joined | None = None

    def start(self, invitation: Invitation, on_joined: OnJoined) -> None:
        def run() -> None:
            for told in run_invited(*self._what, invitation, HOST):
                if isinstance(told, Joined):
                    self._joined = told
                    on_joined(told)
                else:
                    self.exitcode = told
            os.close(self._embed_head)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        if self._joined:
            with suppress(ProcessLookupError):
                os.kill(self._joined.pid, signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def close(self) -> None:
        """Nothing is left to release."""


def remote_engine(
    context: zmq.Context[zmq.Socket[bytes]], build_device: BuildDevice, config: EngineConfig
) -> RemoteEngine:
    return RemoteEngine(context, Beside(build_device, config), HOST)
