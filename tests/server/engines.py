"""The engines of a server under test: one, or as many replicas as ROTA_TEST_REPLICAS says.

With ROTA_TEST_BACKEND=ray they run on a real Ray cluster of three nodes, apart from those whose device a test holds in
its own hands.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from rota.core.config import EngineConfig
from rota.core.ids import EngineId
from rota.core.messages import Message
from rota.runtime.in_process import InProcessService
from rota.runtime.process import EngineProcess
from rota.runtime.service import BuildDevice, Service, ServiceState
from rota.runtime.supervisor import NewEngine, SupervisedService
from rota.runtime.timeouts import EngineTimeouts
from tests.fakes import FakeDevice

REPLICAS = int(os.environ.get("ROTA_TEST_REPLICAS", "1"))
# A server that is a program of its own has its engines beside it: no node could import that program.
IS_ON_RAY = os.environ.get("ROTA_TEST_BACKEND") == "ray" and "pytest" in sys.modules


def engines(build_device: BuildDevice, config: EngineConfig | None = None, replicas: int = REPLICAS) -> Service:
    """Engines in threads of this process; on Ray if no test holds their device."""
    if IS_ON_RAY:
        from tests.server.ray_engines import packed_device

        if packed := packed_device(build_device):
            return processes(packed, config, replicas=replicas)
    return threads(build_device, config, replicas)


def threads(build_device: BuildDevice, config: EngineConfig | None = None, replicas: int = REPLICAS) -> Service:
    """Engines that nobody starts again. A device that a test has made is the first one's, and the others get a twin of
    it, which writes its plans into the same list."""
    taken: list[Any] = []

    def build() -> Any:
        device = build_device()
        if any(device is other for other in taken) and isinstance(device, FakeDevice):
            device = twin_of(device)
        taken.append(device)
        return device

    return joined([InProcessService(build, one) for one in configs(config, replicas)])


def processes(
    build_device: BuildDevice,
    config: EngineConfig | None = None,
    timeouts: EngineTimeouts | None = None,
    replicas: int = REPLICAS,
) -> Service:
    """Engines in processes of their own."""
    new_engine: NewEngine = EngineProcess
    if IS_ON_RAY:
        from tests.server.ray_engines import placed as new_engine
    return joined([SupervisedService(build_device, one, timeouts, new_engine) for one in configs(config, replicas)])


def configs(config: EngineConfig | None, replicas: int) -> list[EngineConfig]:
    return [replace(config or EngineConfig(), engine_id=EngineId(number)) for number in range(replicas)]


def joined(services: Sequence[Service]) -> Service:
    if len(services) == 1:
        return services[0]
    from rota.runtime.replicas.service import ReplicatedService  # an extension: not every run of these tests has it

    return ReplicatedService(services)


def as_of_one(reason: str) -> str:
    """Why a service is down, without the number of the replica that was the first to go down."""
    return re.sub(r"^Replica \d+ is down: ", "", reason)


def twin_of(device: FakeDevice) -> FakeDevice:
    make: Callable[..., FakeDevice] = type(device)
    own = {field.name: getattr(device, field.name) for field in fields(device) if not field.name.startswith("_")}
    return make(**own)


def pids_of(service: Service) -> list[int]:
    """The processes of the engines, by number."""
    return [engine.engine_pid for engine in service.state.engines if engine.engine_pid]


class Heedful:
    """A service that remembers what it was sent."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.sent: list[Message] = []
        self.start, self.stop = service.start, service.stop
        self.wait_until_ready = service.wait_until_ready

    @property
    def state(self) -> ServiceState:
        return self._service.state

    def send(self, message: Message) -> None:
        self.sent.append(message)
        self._service.send(message)
