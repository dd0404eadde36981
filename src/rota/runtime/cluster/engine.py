"""An engine that runs at a place on the cluster."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any

import zmq

from rota.core.config import EngineConfig
from rota.runtime.cluster.cluster import Cluster
from rota.runtime.cluster.needs import Need
from rota.runtime.cluster.place import Place
from rota.runtime.cluster.records import Job
from rota.runtime.remote.engine import RemoteEngine
from rota.runtime.service import BuildDevice
from rota.runtime.watch import Death
from rota.runtime.wire import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """Makes the engines of a service: each is another order to the same cluster."""

    cluster: Cluster
    need: Need
    versions: dict[str, str]
    facts: dict[str, str]
    threads: int | None

    def __call__(
        self, context: zmq.Context[zmq.Socket[bytes]], build_device: BuildDevice, config: EngineConfig
    ) -> PlacedEngine:
        job = Job(
            versions=self.versions,
            facts=self.facts,
            engine=pickle.dumps((build_device, config)),
            threads=self.threads,
        )
        place = self.cluster.place(self.need, job)
        return PlacedEngine(RemoteEngine(context, place, self.cluster.host), place)


class PlacedEngine:
    """A remote engine, and why its place came to an end."""

    def __init__(self, engine: RemoteEngine, place: Place) -> None:
        self._engine, self._place = engine, place

    @property
    def pid(self) -> int | None:
        return self._engine.pid

    def start(self) -> None:
        self._engine.start()

    def send(self, record: Record) -> None:
        self._engine.send(record)

    def watch(self, *how: Any) -> Death:
        death = self._engine.watch(*how)
        # A machine that refuses will do so again, like an engine that says why. Of another end that is not known.
        return replace(death, last_words=death.last_words or death.ending) if self._place.is_refused else death

    def kill(self) -> None:
        self._engine.kill()

    def close(self) -> None:
        self._engine.close()
        self._place.close()
