"""What ranks say to each other.

meeting   follower ── Hello ──────────────────────────▶ leader
          follower ◀── Welcome, or Refused ──────────── leader
serving   follower ◀── Numbered …, Stop ─────────────── leader
          follower ── Building, Ready, Alive, Adapter…, Failed ──▶ leader    (runtime/wire.py, over a second socket)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rota.core.config import EngineConfig
from rota.core.plan import StepPlan
from rota.runtime.wire import Codec, Stop
from rota.runtime.world import Device

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
class Refused:
    """The ranks cannot work together."""

    reason: str


@dataclass(frozen=True, slots=True)
class Numbered:
    """A plan; the first has the number 1. A follower that misses one computes another model from then on."""

    number: int
    plan: StepPlan


CODEC = Codec(Hello, Welcome, Refused, Numbered, Stop)
