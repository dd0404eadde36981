"""Whatever happens to versions and routes, a request goes to what is there, and no route outlives its name."""

from __future__ import annotations

import math
from typing import NoReturn

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rota.core.adapter import Adapter
from rota.core.errors import Fault, FaultCode
from rota.core.events import AdapterRefused, AdapterRemoved, Finished, FinishReason
from rota.core.ids import AdapterId
from rota.core.lora_paths import LoraPath
from rota.core.messages import Message, RemoveAdapter
from rota.core.request import Request
from rota.observe.journey import Journey
from rota.observe.meters import AdapterMeters
from rota.runtime.registry import Registry
from rota.runtime.service import ServicePhase, ServiceState
from rota.server.adapters.manager import AdapterManager
from rota.server.traffic.route import Route, TrafficSplit
from rota.server.traffic.traffic import Shadows, Traffic

NAMES = ("legal", "poet")
DICE = st.integers(0, 1_000)


def unsent(_request: Request) -> NoReturn:
    raise AssertionError("nothing is copied here")


class Notes:
    """Stands in for a service: what it was told."""

    state = ServiceState(phase=ServicePhase.READY)

    def __init__(self) -> None:
        self.leavers: list[AdapterId] = []

    def send(self, message: Message) -> None:
        if isinstance(message, RemoveAdapter):
            self.leavers.append(message.adapter_id)


class Storm(RuleBasedStateMachine):
    """Versions come, are asked for, fail and leave while routes are set and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.registry, self.service = Registry("letters", "/models/letters"), Notes()
        self.adapters = AdapterManager(self.service, self.registry)  # type: ignore[arg-type]
        self.traffic = Traffic(self.registry, Shadows(unsent, lambda: 8))
        self.traffic.tie(self.adapters)

    @property
    def labels(self) -> list[str]:
        """All that a route may name."""
        present = [one for name in NAMES for one in self.registry.versions(name)]
        versions = [one.label for one in present if not self.adapters.is_leaving(one)]
        return versions + [one.name for one in self.registry.adapters]

    def hear(self, event: AdapterRemoved | AdapterRefused) -> None:
        self.adapters.observe([event])
        self.traffic.observe([event])

    @rule(name=st.sampled_from(NAMES), is_staged=st.booleans())
    def load(self, name: str, is_staged: bool) -> None:
        asked = LoraPath(name=name, path="/adapters/new")
        if self.registry.loaded(name) is None:
            self.registry.add(asked)
        elif is_staged:
            self.registry.stage(self.registry.renew(asked))
        else:
            self.registry.switch(self.registry.renew(asked))
            self.adapters.retire(name)

    @precondition(lambda self: self.registry.adapters)
    @rule(data=st.data(), number=DICE)
    def route(self, data: st.DataObject, number: int) -> None:
        name = self.registry.adapters[number % len(self.registry.adapters)].name
        targets = data.draw(st.lists(st.sampled_from(self.labels), min_size=1, max_size=4, unique=True))
        raw = data.draw(st.lists(st.floats(0.01, 1.0), min_size=len(targets), max_size=len(targets)))
        weights = {target: weight / math.fsum(raw) for target, weight in zip(targets, raw, strict=True)}
        rollback = data.draw(st.sampled_from(self.labels))
        shadow = data.draw(st.none() | st.sampled_from([one for one in self.labels if one not in targets] or [None]))
        self.traffic.set(Route(name=name, split=TrafficSplit(weights), rollback=rollback, shadow=shadow))

    @rule(name=st.sampled_from(NAMES))
    def end_route(self, name: str) -> None:
        self.traffic.end(name)

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: str) -> None:
        if self.registry.loaded(name):
            self.service.leavers += [one.adapter_id for one in self.registry.versions(name)]
            self.registry.forget(name)
            self.adapters.on_unload(name)

    @precondition(lambda self: self.service.leavers)
    @rule(number=DICE)
    def leave(self, number: int) -> None:
        """The last user of a version has ended."""
        self.hear(AdapterRemoved(self.service.leavers.pop(number % len(self.service.leavers)), 1.0))

    @precondition(lambda self: self.registry.others)
    @rule(number=DICE, is_told=st.booleans())
    def delete(self, number: int, is_told: bool) -> None:
        others = self.registry.others
        gone = others[number % len(others)]
        self.registry.discard(gone.adapter_id)
        if is_told:
            self.hear(AdapterRemoved(gone.adapter_id, 1.0))

    @precondition(lambda self: self.registry.adapters)
    @rule(number=DICE, code=st.sampled_from([FaultCode.NOT_A_NUMBER, FaultCode.ADAPTER_FAILED, FaultCode.QUEUE_FULL]))
    def fail(self, number: int, code: FaultCode) -> None:
        present = [one for name in NAMES for one in self.registry.versions(name)]
        failed = present[number % len(present)]
        ending = Finished(request_id="a", at=1.0, reason=FinishReason.FAILED, fault=Fault(code, "So it is."))
        journey = Journey(failed.adapter_id, failed.name, 0.0, AdapterMeters(failed.name))
        self.traffic.ended("a", journey, ending)
        if code is not FaultCode.QUEUE_FULL:
            for route in self.traffic.routes:
                sent = {self.registry.get(target) for target in route.weights if target != route.rollback}
                assert failed not in sent, "a target that failed gets no more requests"

    @invariant()
    def every_request_goes_to_something_that_is_there(self) -> None:
        present = {one for name in NAMES for one in self.registry.versions(name)}
        for named in self.registry.adapters:
            for asker in (None, "ann"):
                chosen = self.traffic.choose(named, asker)
                assert chosen.adapter in present
                assert chosen.shadow is None or chosen.shadow in present

    @invariant()
    def routes_are_of_loaded_names_and_send_everything(self) -> None:
        for route in self.traffic.routes:
            assert self.registry.loaded(route.name)
            assert math.isclose(math.fsum(route.weights.values()), 1.0)

    @invariant()
    def versions_that_a_route_needs_are_not_sent_away(self) -> None:
        needed = [found for route in self.traffic.routes for one in route.named if (found := self._version(one))]
        assert not [one for one in needed if self.adapters.is_leaving(one)]

    def _version(self, label: str) -> Adapter | None:
        return self.registry.get(label) if "@" in label else None

    def teardown(self) -> None:
        """When all names are unloaded, nothing is left of any route."""
        for name in NAMES:
            self.unload(name)
        assert self.traffic.routes == []
        assert self.traffic.meters.weights == []


Storm.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestStorm = Storm.TestCase
