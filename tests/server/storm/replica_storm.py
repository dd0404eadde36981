"""The storm over two replicas, and a third that joins: each dies, stands still and comes back on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from rota.core.config import EngineConfig
from tests.server.storm.library import GOOD
from tests.server.storm.replicas import SteppedReplicas
from tests.server.storm.stepped import Next
from tests.server.storm.storm import DICE, PASSES, RARELY, Storm

FIRST, LATE = 2, 1
MOMENTS = ("receive", "submit", "collect")
MOST_KILLS = 5


class ReplicaStorm(Storm):
    """What happens to one engine happens to one of several."""

    service: SteppedReplicas

    def new_service(self, build: Callable[[], Any], config: EngineConfig) -> SteppedReplicas:
        return SteppedReplicas(build, config, self._note, FIRST, LATE)

    @precondition(lambda self: self.kills < MOST_KILLS and self.service.up)
    @rule(number=DICE, at=st.sampled_from(MOMENTS), next_engine=st.sampled_from([*Next, Next.LATER]))
    def kill(self, number: int, at: str, next_engine: Next) -> None:
        """The last replica is not given up on."""
        up = self.service.up
        if next_engine is Next.NEVER and self.service.lasting < 2:
            return
        self.kills += 1
        self.service.replicas[up[number % len(up)]].kill(at, next_engine)

    @precondition(lambda self: self.kills < MOST_KILLS and self.service.up)
    @rule(number=DICE, kind=st.none() | st.sampled_from(GOOD), passes=PASSES)
    def restart(self, number: int, kind: str | None, passes: int) -> None:
        """An engine is followed by another at once, and a folder may be gone by then."""
        if kind:
            self.move_folder(kind, is_there=False)
        self.kill(number, "receive", Next.AT_ONCE)
        self.steps(passes + 1)

    @rule(number=DICE)
    def come_back(self, number: int) -> None:
        self.service.come(number % len(self.service.replicas))

    @rule(number=DICE, is_so=RARELY)
    def stall(self, number: int, is_so: bool) -> None:
        """One replica makes no passes while the others go on."""
        self.service.stalled = {number % len(self.service.replicas)} if is_so else set()

    @rule(number=DICE, is_held=RARELY)
    def hold_reads(self, number: int, is_held: bool) -> None:
        self.service.hold_reports(number % len(self.service.replicas), is_held)

    @precondition(lambda self: len(self.service.replicas) == FIRST)
    @rule(is_so=RARELY)
    def join(self, is_so: bool) -> None:
        if is_so:
            self.service.join()
