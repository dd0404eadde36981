"""For tests of engines elsewhere: this machine plays the other machine, in a process that runs an invited engine."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import zmq

from rota.core.config import EngineConfig
from rota.runtime.cluster.records import Invitation, Joined, OnJoined
from rota.runtime.cluster.remote_engine import RemoteEngine, run_invited
from rota.runtime.lifeline import die_with
from rota.runtime.service import BuildDevice

HOST = "127.0.0.1"
# The address that one side is told for the address at which the other listens.
Detour = Callable[[str], str]


def host_main(
    build_device: BuildDevice, config: EngineConfig, invitation: Invitation, news: Connection, parent: int
) -> None:
    die_with(parent)
    for told in run_invited(build_device, config, invitation, HOST):
        news.send(told)


class NearElsewhere:
    """A place as a cluster has them: a process on this machine starts the engine. A pipe brings what that tells."""

    def __init__(self, build_device: BuildDevice, config: EngineConfig, detour: Detour = str, ending: str = "") -> None:
        self.ending, self.waiting, self.is_refused = ending, "", False
        self.invitation: Invitation | None = None
        self.joined: Joined | None = None
        self._what, self._detour = (build_device, config), detour
        self._told: int | None = None

    @property
    def sentinel(self) -> int:
        return self._process.sentinel

    @property
    def exitcode(self) -> int | None:
        self._reader.join()
        return self._process.exitcode if self._told is None else self._told

    def start(self, invitation: Invitation, on_joined: OnJoined) -> None:
        self.invitation = invitation
        news, sender = multiprocessing.Pipe(duplex=False)
        told = replace(invitation, events=self._detour(invitation.events))
        # A daemon may have no children, so this is none; it dies with this process all the same.
        self._process = multiprocessing.get_context("spawn").Process(
            target=host_main, args=(*self._what, told, sender, os.getpid())
        )
        self._process.start()
        sender.close()
        self._reader = threading.Thread(target=self._read, args=(news, on_joined), daemon=True)
        self._reader.start()

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout: float | None = None) -> None:
        self._process.join(timeout)

    def close(self) -> None:
        """Nothing is left to release."""

    def _read(self, news: Connection, on_joined: OnJoined) -> None:
        with news:
            try:
                self.joined = news.recv()
                on_joined(replace(self.joined, messages=self._detour(self.joined.messages)))
                self._told = news.recv()
            except EOFError:
                pass  # it was killed


class Elsewheres:
    """Makes remote engines for a supervisor, and keeps what they were told, the first first."""

    def __init__(self, detour: Detour = str, ending: str = "") -> None:
        self.all: list[NearElsewhere] = []
        self._how = (detour, ending)

    def new_engine(
        self, context: zmq.Context[zmq.Socket[bytes]], build_device: BuildDevice, config: EngineConfig
    ) -> RemoteEngine:
        self.all.append(NearElsewhere(build_device, config, *self._how))
        place: Any = self.all[-1]
        return RemoteEngine(context, place, HOST)
