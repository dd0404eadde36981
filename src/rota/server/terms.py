"""Terms say how a new version of an adapter takes the place of the old one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """What a new version means for its name and for the answers that run."""

    FINISH = "finish"  # the name means the new version; running answers end under theirs
    SWITCH = "switch"  # the name means the new version, and running answers go on under it
    STAGE = "stage"  # the name means what it meant; `name@version` asks for the new version


@dataclass(frozen=True, slots=True)
class Terms:
    """How a new version takes the place of the old one."""

    mode: Mode = Mode.FINISH
    keeps_old: bool = False  # the old version stays until it is removed; else it leaves with its last user
    keeps_kv: bool = False  # of answers that go on under the new version


AT_ONCE = Terms()
