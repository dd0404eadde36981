"""Loops in threads that exchange reports, with inboxes as an engine's process has them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import zmq

from rota.core.config import EngineConfig
from rota.core.events import Event
from rota.core.ids import EngineId
from rota.core.messages import Message
from rota.policy.prefill_delayer import Alone, RankReport
from rota.runtime.live import LiveWorld
from rota.runtime.loop import run
from rota.runtime.replicas.exchange.all_gather import AllGather
from rota.runtime.replicas.exchange.place import Board, exchange_place, open_exchange
from rota.runtime.wire import Record, SocketInbox, Stop, encode, open_socket
from rota.runtime.world import Device
from rota.scheduler import Scheduler


class Rank:
    """One loop; counts its passes, and keeps what it was told last."""

    def __init__(
        self, config: EngineConfig, rank: int, device: Device[Any], context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        placed = replace(config, engine_id=EngineId(rank))
        self.exchange, caller = open_exchange(placed) if config.exchange_at else (Alone(), None)
        self.passes = 0
        self.reports: list[RankReport] = []
        self.events: list[Event] = []
        receiver, self._sender = open_socket(context, zmq.PULL), open_socket(context, zmq.PUSH)
        receiver.bind(f"inproc://rank-{rank}")
        self._sender.connect(f"inproc://rank-{rank}")
        inbox = SocketInbox(receiver)
        if caller:
            inbox.wake_with(caller.fileno())
        scheduler = Scheduler.from_config(config, device.capacity, self)
        world = LiveWorld(device, inbox, caller=caller)
        self._thread = threading.Thread(target=run, args=(scheduler, world, self.events.extend))
        self._thread.start()

    def share(self, report: RankReport) -> list[RankReport]:
        self.passes += 1
        self.reports = self.exchange.share(report)
        return self.reports

    def send(self, message: Message) -> None:
        self._send(message)

    def stop(self) -> None:
        self._send(Stop())
        self._thread.join()
        if isinstance(self.exchange, AllGather | Board):
            self.exchange.close()

    def _send(self, record: Record) -> None:
        self._sender.send(encode([record]))


@contextmanager
def loops_of(config: EngineConfig, devices: Sequence[Device[Any]]) -> Iterator[list[Rank]]:
    with exchange_place(config, len(devices)) as placed, ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        stack.callback(context.destroy, linger=0)
        ranks = []
        for number, device in enumerate(devices):
            ranks.append(Rank(placed, number, device, context))
            stack.callback(ranks[-1].stop)
        yield ranks
