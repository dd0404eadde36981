"""An invitation tells an engine elsewhere where its front listens; its answer tells where the engine does.

Only public keys travel in them. A secret key stays in the process that made it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where the front takes events: "tcp://10.0.0.1:41234", and its public key in Z85."""

    events: str
    front_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Where the engine takes messages, its public key in Z85, and which process on which machine it is."""

    messages: str
    engine_key: str
    node: str
    pid: int


OnJoined = Callable[[Joined], None]


class Elsewhere(Protocol):
    """A process for one engine on another machine, from its order to its end. A watch looks at it like at a child."""

    @property
    def sentinel(self) -> int:
        """A file that becomes readable once the process has ended, or will never begin."""
        ...

    @property
    def exitcode(self) -> int | None:
        """None while it runs, and also if its exit code is not known."""
        ...

    @property
    def ending(self) -> str:
        """Why it ended, as a sentence, if that is known here: its machine is gone, or no machine fits."""
        ...

    @property
    def waiting(self) -> str:
        """Why it has not begun and may not for long, as a sentence: no machine has room, or the cluster is gone. Empty
        once it has a place, and while one is being looked for and will soon be found."""
        ...

    def start(self, invitation: Invitation, on_joined: OnJoined) -> None:
        """Begin, without waiting; `on_joined` is called once, from another thread, when the engine listens."""
        ...

    def kill(self) -> None:
        """End it, without waiting. Also one that has not begun."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, for at most so many seconds."""
        ...
