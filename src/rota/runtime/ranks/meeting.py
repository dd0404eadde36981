"""The meeting: rank 0 waits until every rank has arrived, compares what they bring, and lets them build."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from rota.core.errors import ConfigError, EngineDiedError
from rota.core.plan import StepPlan
from rota.runtime.patience import LINGER_S
from rota.runtime.progress import tell_progress
from rota.runtime.ranks.facts import difference
from rota.runtime.ranks.records import CODEC, Hello, Numbered, Refused, Welcome
from rota.runtime.wire import Stop, open_socket

# Ranks that torchrun starts on several machines may come some time after each other.
MEET_S = 120.0
# How often the leader looks whether a process that it started still runs.
_LOOK_MS = 100
# A machine that is gone closes no connection: the sockets themselves ask for a sign of life.
_HEARTBEAT_MS, _DEAD_MS = 1000, 10_000

_MORE = int(zmq.SNDMORE)  # looked up for every plan

Socket = zmq.Socket[bytes]


def open_line(context: zmq.Context[Socket], kind: int, linger_s: float = 0.0) -> Socket:
    """A socket between ranks, which notices a peer whose machine is gone."""
    socket = open_socket(context, kind, linger_s)
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _DEAD_MS
    return socket


class Meeting:
    """The leader's side: the socket that takes `Hello`s, and plans to the followers afterwards. For one thread."""

    def __init__(self, context: zmq.Context[Socket], size: int, bind: str, secret: str = "") -> None:
        self._size = size
        self._secret = secret
        self._socket = open_line(context, zmq.ROUTER, LINGER_S)
        self._socket.router_mandatory = True  # a plan to a follower that is gone is an error, not lost
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            raise ConfigError(f"Rank 0 cannot wait for the other ranks at {bind}: {error}.") from error
        self._arrived: dict[int, tuple[bytes, dict[str, str]]] = {}
        self._identities: list[bytes] = []
        self._number = 0

    @property
    def address(self) -> str:
        """Where it was bound: a port that was left open is known by now."""
        return self._socket.get_string(zmq.LAST_ENDPOINT)

    def gather(self, complaint: Callable[[], str], within_s: float) -> None:
        """Wait for all ranks; raises with the numbers of those that are missing, or with the complaint about one."""
        ends_at = time.monotonic() + within_s
        while missing := self._missing():
            if time.monotonic() > ends_at:
                raise EngineDiedError(_absent(missing, within_s))
            if reason := complaint():
                raise EngineDiedError(reason)
            tell_progress("Waiting for other ranks")
            if self._socket.poll(_LOOK_MS):
                self._greet()

    def compare(self, own: dict[str, str]) -> None:
        """Refuse ranks that differ from rank 0, with a sentence that names the rank and the difference."""
        if reason := difference(own, {rank: theirs for rank, (_, theirs) in self._arrived.items()}):
            self._send(Refused(reason))
            raise ConfigError(reason)

    def welcome(self, meeting: str, reports: str) -> dict[bytes, int]:
        """Let all ranks build; gives their names at `reports`, which nobody else can know."""
        names = {secrets.token_bytes(8): rank for rank in self._arrived}
        for name, rank in names.items():
            packet = CODEC.encode([Welcome(meeting=meeting, reports=reports, name=name)])
            self._socket.send_multipart([self._arrived[rank][0], packet])
        return names

    def send_plan(self, plan: StepPlan) -> None:
        self._number += 1
        self._send(Numbered(self._number, plan))

    def dismiss(self) -> None:
        """No plan will follow."""
        with suppress(zmq.ZMQError):  # a follower that is gone needs no word
            self._send(Stop())

    def close(self) -> None:
        """What was sent may still arrive."""
        self._socket.close()

    def _send(self, record: Refused | Numbered | Stop) -> None:
        """Encoded once, and sent to every follower."""
        packet, send = CODEC.encode([record]), self._socket.send
        for identity in self._identities:
            send(identity, _MORE)
            send(packet)

    def _greet(self) -> None:
        identity, packet = self._socket.recv_multipart()
        (hello,) = CODEC.decode(packet)
        if not isinstance(hello, Hello) or hello.secret != self._secret:
            return  # not one of ours
        if hello.size != self._size or not 0 < hello.rank < self._size:
            reason = f"Rank {hello.rank} of {hello.size} came to a meeting of {self._size} ranks."
            self._socket.send_multipart([identity, CODEC.encode([Refused(reason)])])
            raise ConfigError(reason)
        self._arrived[hello.rank] = identity, hello.facts  # a rank that was started again takes its own place
        self._identities = [each for each, _ in self._arrived.values()]

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._size) if rank not in self._arrived]


def _absent(missing: list[int], within_s: float) -> str:
    ranks = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
    return f"{ranks} did not arrive within {within_s:g} seconds."
