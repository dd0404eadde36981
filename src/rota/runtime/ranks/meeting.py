"""The meeting: rank 0 waits until every rank has arrived with the same facts; and what ranks say to each other."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import zmq

from rota.core.config import EngineConfig
from rota.core.errors import ConfigError, EngineDiedError
from rota.core.plan import StepPlan
from rota.core.version import __version__
from rota.runtime.timeouts import LINGER_S
from rota.runtime.wire import Codec, Stop, open_socket
from rota.runtime.world import Device
from rota.start import START

# ── records ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# What ranks say to each other.
#
# meeting   follower ── Hello ──────────────────────────▶ leader
#           follower ◀── Welcome, or Refused ──────────── leader
# serving   follower ◀── Numbered …, Stop ─────────────── leader
#           follower ── Building, Ready, Alive, Adapter…, Failed ──▶ leader    (runtime/wire.py, over a second socket)

# Builds the device of one rank; the config says which.
MakeDevice = Callable[[EngineConfig], Device[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A follower has arrived, with what must be the same on all ranks."""

    rank: int
    size: int
    secret: str
    facts: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """All ranks have arrived and are alike: build."""

    meeting: str  # where the engines find each other
    reports: str  # where the leader hears its followers
    name: bytes  # by which the leader knows this follower there


@dataclass(frozen=True, slots=True)
class MeetingRefused:
    """The ranks cannot work together."""

    reason: str


@dataclass(frozen=True, slots=True)
class Numbered:
    """A plan; the first has the number 1. A follower that misses one computes another model from then on."""

    number: int
    plan: StepPlan


CODEC = Codec(Hello, Welcome, MeetingRefused, Numbered, Stop)


# ── facts ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Facts are what must be the same on all ranks, and on all machines: versions, flags and the model's files.

# As installed: their versions change what a step computes, or what ranks tell each other.
_LIBRARIES = ("torch", "triton", "flashinfer-python")
# Folders differ between machines; what lies in them is compared. Only rank 0 loads the adapters to start with.
_MAY_DIFFER = {"model_path", "lora_paths"}
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".index.json")
# Of each file so many pieces are read: another fine-tune differs everywhere, and a whole file may have 100 GB.
_PIECES, _PIECE_BYTES = 64, 4096


def facts(config: EngineConfig) -> dict[str, str]:
    """By name, each as a word."""
    return {**versions(), **dict(_flags(config)), **dict(_files(config))}


def difference(own: dict[str, str], others: dict[int, dict[str, str]]) -> str:
    """Which ranks differ from rank 0 in what, as a sentence; empty if none does."""
    found = [one for rank, theirs in sorted(others.items()) for one in compared("rank 0", own, f"rank {rank}", theirs)]
    return f"All ranks must have the same model, flags and versions: {'; '.join(found)}." if found else ""


def compared(us: str, own: dict[str, str], them: str, theirs: dict[str, str]) -> list[str]:
    """What differs between two, each difference as a clause with both values."""
    return [
        f"{them} has {theirs.get(name, 'nothing')} for {name}, and {us} has {own.get(name, 'nothing')}"
        for name in sorted(own.keys() | theirs.keys())
        if own.get(name) != theirs.get(name)
    ]


def versions(*others: str) -> dict[str, str]:
    """Of Rota and the libraries that decide what a step computes, and of other libraries."""
    return {"the version of Rota": __version__} | {
        f"the version of {name}": found.version
        for name in (*_LIBRARIES, *others)
        for found in metadata.distributions(name=name)
    }


def _flags(config: EngineConfig) -> Iterator[tuple[str, str]]:
    for section in (config.model, config.cache, config.scheduler, config.lora, config.policy):
        for each in fields(section):
            if each.name not in _MAY_DIFFER:
                yield f"--{each.name.replace('_', '-')}", str(getattr(section, each.name))


def _files(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Digests; a folder that is missing is the engine's to refuse."""
    path = Path(config.model.model_path or "")
    present = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    yield "the model's config.json", _digest(each for each in present if each.name == "config.json")
    if config.model.load_format != "dummy":
        yield "the model's weights", _digest(each for each in present if each.name.endswith(_WEIGHTS))


def _digest(paths: Iterable[Path]) -> str:
    """Of names, sizes and pieces of the contents."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(_PIECE_BYTES, size // _PIECES)):
                file.seek(start)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()[:12]


# ── meeting ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# The meeting: rank 0 waits until every rank has arrived, compares what they bring, and lets them build.

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
            self._socket.close()
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
            START.tell_progress("Waiting for other ranks")
            if self._socket.poll(_LOOK_MS):
                self._greet()

    def compare(self, own: dict[str, str]) -> None:
        """Refuse ranks that differ from rank 0, with a sentence that names the rank and the difference."""
        if reason := difference(own, {rank: theirs for rank, (_, theirs) in self._arrived.items()}):
            self._send(MeetingRefused(reason))
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

    def _send(self, record: MeetingRefused | Numbered | Stop) -> None:
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
            self._socket.send_multipart([identity, CODEC.encode([MeetingRefused(reason)])])
            raise ConfigError(reason)
        self._arrived[hello.rank] = identity, hello.facts  # a rank that was started again takes its own place
        self._identities = [each for each, _ in self._arrived.values()]

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._size) if rank not in self._arrived]


def _absent(missing: list[int], within_s: float) -> str:
    ranks = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
    return f"{ranks} did not arrive within {within_s:g} seconds."
