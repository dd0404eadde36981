"""Several stepped engines behind one service, of which each may stand still, die and come back on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from rota.core.config import EngineConfig
from rota.core.events import Event
from rota.core.ids import AdapterId
from rota.core.messages import AddAdapter, Message
from rota.runtime.replicas.router import Router
from rota.runtime.replicas.service import ReplicatedService
from rota.runtime.service import Deliver, ServicePhase, ServiceState
from tests.server.engines import configs
from tests.server.storm.library import GOOD
from tests.server.storm.stepped import Next, SteppedService
from tests.server.storm.storm import DICE, PASSES, RARELY, Storm


class SteppedReplicas:
    """As one stepped service: the desk, the router and the books of adapters are the server's own."""

    def __init__(
        self,
        build: Callable[[], Any],
        config: EngineConfig,
        on_add: Callable[[AddAdapter], None],
        first: int,
        late: int,
    ) -> None:
        """`first` replicas are there from the start, and `late` ones may join."""
        self.events: list[Event] = []
        made = [SteppedService(build, one, on_add, self.events) for one in configs(config, first + late)]
        self.replicas, self._late = made[:first], made[first:]
        self.stalled: set[int] = set()  # make no passes
        # Prices are measured, and a storm must be the same once more: requests go to the replicas in turn.
        self.joint = ReplicatedService(self.replicas, Router(first, "round-robin"))

    @property
    def state(self) -> ServiceState:
        return self.joint.state

    def wait_until_ready(self, timeout_s: float | None = None) -> Any:
        return self.joint.wait_until_ready(timeout_s)

    def start(self, deliver: Deliver) -> None:
        self.joint.start(deliver)

    def send(self, message: Message) -> None:
        self.joint.send(message)

    def stop(self) -> None:
        self.joint.stop()

    def join(self) -> None:
        """One more replica, whose engine comes when it is told to."""
        if self._late:
            newcomer = self._late.pop(0)
            newcomer.next_engine = Next.LATER
            self.replicas = [*self.replicas, newcomer]
            self.joint.add(newcomer)

    def step(self) -> None:
        for number, replica in enumerate(self.replicas):
            if number not in self.stalled:
                replica.step()

    def come(self, number: int) -> None:
        replica = self.replicas[number]
        if replica.state.phase is ServicePhase.STARTING:
            replica.come()

    def hold_reports(self, number: int, is_held: bool) -> None:
        self.replicas[number].holds_reports = is_held

    def calm(self) -> None:
        self.stalled.clear()
        for replica in self.replicas:
            replica.calm()

    @property
    def up(self) -> list[int]:
        return [number for number, one in enumerate(self.replicas) if one.device is not None]

    @property
    def lasting(self) -> int:
        """How many replicas have an engine or will get one."""
        return sum(
            one.state.phase is not ServicePhase.DOWN and one.next_engine is not Next.NEVER for one in self.replicas
        )

    @property
    def is_idle(self) -> bool:
        return all(replica.is_idle for replica in self.replicas)

    @property
    def is_running(self) -> bool:
        return any(replica.is_running for replica in self.replicas)

    @property
    def users(self) -> dict[AdapterId, int]:
        """Of all replicas."""
        numbers: dict[AdapterId, int] = {}
        for replica in self.replicas:
            for adapter_id, users in replica.users.items():
                numbers[adapter_id] = numbers.get(adapter_id, 0) + users
        return numbers

    @property
    def owes(self) -> list[Any]:
        """What the replicas owe, and what the desk still knows of requests and adapters."""
        desk = self.joint._desk
        known = [desk._at, desk._ended, desk._removals, desk._adapters._entries, desk._router._at]
        return [*(one for replica in self.replicas for one in replica.owes), *(one for some in known for one in some)]

    @property
    def mixed(self) -> set[str]:
        return {one for replica in self.replicas for one in replica.mixed}


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
