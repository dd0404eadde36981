"""Records travel between server and engine process as tagged lists in msgpack, one list in a ZeroMQ message.

server   PUSH ── Request, Abort, UploadPiece, Stop ─▶ PULL  engine
server   PULL ◀── Building, Ready, Alive, Event …, Failed ── PUSH   engine
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
import zmq

from rota.core.capacity import Capacity
from rota.core.config import FirstAdapters
from rota.core.events import Event
from rota.core.messages import Message
from rota.core.stages import AutotuneResult, Stage
from rota.runtime.doorbell import Doorbell
from rota.runtime.heartbeat import BEAT_S
from rota.runtime.spool import Arrivals, UploadPiece


@dataclass(frozen=True, slots=True)
class Stop:
    """The server wants the engine to end; the last record to the engine."""


@dataclass(frozen=True, slots=True)
class First:
    """What the adapters to start with need. An engine whose config lacks it waits for it before it is built."""

    adapters: FirstAdapters


@dataclass(frozen=True, slots=True)
class Building:
    """The engine is not ready yet, and its start goes on: it reads weights, compiles, or tries the device."""

    what: str


@dataclass(frozen=True, slots=True)
class Alive:
    """The loop goes round. The longest of the steps in flight should take so long."""

    expected_s: float


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine serves from now on; its first record behind `Building` if the start went well."""

    capacity: Capacity
    stages: tuple[Stage, ...] = ()  # of its start
    autotuned: tuple[AutotuneResult, ...] = ()  # for the next engine


@dataclass(frozen=True, slots=True)
class Failed:
    """Why the engine cannot start or go on; its last record."""

    reason: str
    is_own: bool = True  # no lack of memory, and no loss of another process


Record = Message | UploadPiece | Stop | First | Building | Ready | Alive | Failed | Event

_ENCODER = msgspec.msgpack.Encoder()
# Bodies stay raw until their tag says how to decode them.
_TAGGED: msgspec.msgpack.Decoder[list[tuple[str, msgspec.Raw]]] = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw]])


class Codec:
    """Packets of records of certain kinds; each record is tagged with the name of its kind."""

    def __init__(self, *kinds: Any) -> None:
        self._decoders = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in kinds}

    def encode(self, records: Sequence[Any]) -> bytes:
        return _ENCODER.encode([(type(record).__name__, record) for record in records])

    def decode(self, packet: bytes) -> list[Any]:
        """The records of one packet, in order."""
        return [self._decoders[tag].decode(body) for tag, body in _TAGGED.decode(packet)]


_CODEC = Codec(*get_args(Record))
encode: Callable[[Sequence[Record]], bytes] = _CODEC.encode
decode = _CODEC.decode


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, linger_s: float = 0.0) -> zmq.Socket[bytes]:
    """A socket whose `send` never blocks; once closed it may still deliver for `linger_s`."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.linger = int(linger_s * 1000.0)
    return socket


def receive_all(socket: zmq.Socket[bytes], wait_s: float = 0.0) -> list[Any]:
    """Every record that has arrived, or arrives within `wait_s` after the record before."""
    records: list[Any] = []
    while socket.poll(math.ceil(wait_s * 1000.0)):
        records.extend(decode(socket.recv()))
    return records


class Outbox:
    """The engine's records on their way to the supervisor, from any thread: kernels are compiled in a thread."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._lock = threading.Lock()
        self._told_at = -math.inf

    def send(self, records: Sequence[Record]) -> None:
        packet = encode(records)
        with self._lock:
            self._socket.send(packet)

    def tell_progress(self, what: str) -> None:
        """The start goes on. Called for every tensor, so it sends only now and then."""
        now = time.monotonic()
        if now - self._told_at >= BEAT_S:
            self._told_at = now
            self.send([Building(what)])

    def tell_alive(self, expected_s: float) -> None:
        self.send([Alive(expected_s)])


class SocketInbox:
    """An inbox for messages from another process and from threads of this process; `Stop` closes it."""

    def __init__(self, socket: zmq.Socket[bytes], arrivals: Arrivals | None = None) -> None:
        self._socket = socket
        self._arrivals = arrivals or Arrivals()
        self._early: list[Record] = []
        self._doorbell = Doorbell()
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._doorbell.fileno(), zmq.POLLIN)
        self._is_closed = False

    def wait_for_first(self, tell_progress: Callable[[str], None]) -> FirstAdapters:
        """What the first adapters need, for an engine that is being built; messages for its loop are kept.

        Blocks. The server looks at folders meanwhile, and a slow disk is no hang.
        """
        first: FirstAdapters | None = None
        while first is None:
            tell_progress("looks at the adapters to start with")
            self._socket.poll(math.ceil(BEAT_S * 1000.0))
            for record in receive_all(self._socket):
                if isinstance(record, First):
                    first = record.adapters
                else:
                    self._early.append(record)
        return first

    def wake_with(self, bell: int) -> None:
        """`bell` is a file that becomes readable when the loop is wanted though no message comes."""
        self._poller.register(bell, zmq.POLLIN)

    def post(self, message: Message) -> None:
        self._doorbell.post(message)

    def take(self, wait_s: float) -> list[Message] | None:
        if self._is_closed:
            return None
        if not self._early:
            # ZeroMQ takes whole milliseconds; None means without end.
            self._poller.poll(None if wait_s == math.inf else math.ceil(wait_s * 1000.0))
        messages: list[Message] = self._doorbell.take()
        early, self._early = self._early, []
        for record in (*early, *receive_all(self._socket)):
            if isinstance(record, Stop):
                self._is_closed = True
                break
            # If a device was built without it, `First` comes too late to matter.
            if not isinstance(record, First) and (message := self._arrivals.take(record)) is not None:
                messages.append(message)
        return None if self._is_closed and not messages else messages
