"""Connection meters count connections that are open, that were refused, and that the server closed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Refusal(StrEnum):
    """Why a new connection was refused."""

    ADDRESS = "address"  # its address has as many as it may have, and none of them is idle
    ALL = "all"  # the server has as many as it may have, and none of them is idle
    FILES = "files"  # the process may open no more files


class Closure(StrEnum):
    """Why the server closed a connection that had no answer to wait for, or whose client was too slow."""

    SLOW_HEAD = "slow_head"
    SLOW_BODY = "slow_body"
    SLOW_READER = "slow_reader"
    MADE_ROOM = "made_room"  # it was idle, and another connection came


@dataclass(slots=True)
class ConnectionMeters:
    """Plain numbers that only the event loop changes."""

    open: int = 0
    most: int = 0  # that may be open; 0: no server listens yet
    refused: dict[Refusal, int] = field(default_factory=lambda: dict.fromkeys(Refusal, 0))
    closed: dict[Closure, int] = field(default_factory=lambda: dict.fromkeys(Closure, 0))
