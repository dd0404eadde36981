"""Rank 0 brings the ranks together: it starts or awaits the others, meets them, builds with them, and leads."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import zmq

from rota.core.capacity import Capacity
from rota.core.config import EngineConfig
from rota.core.errors import ConfigError, RotaError
from rota.runtime.last_words import end_with
from rota.runtime.patience import Patience
from rota.runtime.ranks.agreement import Agreement
from rota.runtime.ranks.facts import facts
from rota.runtime.ranks.leader import Leader
from rota.runtime.ranks.listener import Listener
from rota.runtime.ranks.meeting import MEET_S, Meeting, Socket, open_line
from rota.runtime.ranks.place import Place, torchrun_place
from rota.runtime.ranks.processes import FollowerProcesses, Job
from rota.runtime.ranks.records import MakeDevice
from rota.runtime.trials import known_trials
from rota.runtime.world import Device

_HERE = "127.0.0.1"
# Ranks may have found different amounts of these; the ledgers then use the least. All else must be equal.
_LEAST = ("blocks", "slots")
# Told to users, and used by no ledger; and what rank 0 took when it was tried, since its scheduler decides.
_OF_RANK_0 = ("adapter_bytes", "slots_from", "rank_from", "decode_s", "token_s")


def build_ranks(make_device: MakeDevice, config: EngineConfig, patience: Patience | None = None) -> Device[Any]:
    """The device of a config: one rank's own, or that of all ranks together if they have not met yet."""
    if config.model.tensor_parallel_size == 1 or config.meeting:
        return make_device(config)
    place = torchrun_place(config.model.tensor_parallel_size, os.environ)
    return lead(make_device, config, patience or Patience(), place)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    """The sockets and processes behind a leader."""

    context: zmq.Context[Socket]
    meeting: Meeting
    reports: Socket
    processes: FollowerProcesses

    def close(self) -> None:
        self.processes.end()
        self.meeting.close()
        self.reports.close()
        self.context.term()


def lead(
    make_device: MakeDevice, config: EngineConfig, patience: Patience, place: Place | None, meet_s: float = MEET_S
) -> Leader[Any]:
    """Build all ranks; returns once every rank is ready. The thread that calls it must live as long as the ranks."""
    size, host = config.model.tensor_parallel_size, place.host if place else _HERE
    if place is None:
        config = replace(config, local_ranks=size)
    else:
        config = replace(config, device_number=place.device_number, local_ranks=place.local_ranks)
    with ExitStack() as undo:  # a start that fails leaves no process and no port behind
        lines = _open_lines(make_device, config, place, meet_s)
        undo.callback(lines.close)
        lines.meeting.gather(lines.processes.complaint, meet_s)
        lines.meeting.compare(facts(config))
        config = replace(config, meeting=f"tcp://{host}:{_free_port(host)}")
        port = lines.reports.bind_to_random_port("tcp://*" if place else f"tcp://{_HERE}")
        names = lines.meeting.welcome(config.meeting, f"tcp://{host}:{port}")
        agreement = Agreement(range(size))
        listener = Listener(lines.reports, names, agreement, lines.processes, end_with, patience)
        listener.start()
        undo.callback(listener.close)
        device = _built(make_device, config, listener)
        capacity = agree({0: device.capacity, **listener.capacities()})
        undo.pop_all()
    return Leader(device, capacity, lines.meeting, agreement, listener, lines.close)


def _built(make_device: MakeDevice, config: EngineConfig, listener: Listener) -> Device[Any]:
    try:
        return make_device(config)
    except RotaError:
        raise  # it says what is wrong, on this rank and most likely on all
    except Exception:  # whatever it is, it goes on; but a follower that is lost is the better reason
        listener.check_after_failure()
        raise


def agree(capacities: dict[int, Capacity]) -> Capacity:
    """What every rank can hold; raises with the rank that differs where no least makes sense."""
    own = capacities[0]
    for rank, theirs in sorted(capacities.items()):
        for name in Capacity.__slots__:
            if name not in (*_LEAST, *_OF_RANK_0) and getattr(theirs, name) != getattr(own, name):
                raise ConfigError(
                    f"All ranks must be alike, but rank {rank} has {getattr(theirs, name)} for {name}, and rank 0 has "
                    f"{getattr(own, name)}."
                )
    least = {name: min(getattr(capacity, name) for capacity in capacities.values()) for name in _LEAST}
    return replace(own, ranks=len(capacities), **least)


def _open_lines(make_device: MakeDevice, config: EngineConfig, place: Place | None, meet_s: float) -> _Lines:
    size = config.model.tensor_parallel_size
    context: zmq.Context[Socket] = zmq.Context()
    secret = "" if place else secrets.token_hex(16)
    meeting = Meeting(context, size, f"tcp://*:{place.port}" if place else f"tcp://{_HERE}:*", secret)
    jobs = [
        Job(
            make_device=make_device,
            # Progress bars of several processes would overwrite each other.
            config=replace(config, rank=rank, device_number=config.device_number + rank, quiet=True),
            address=meeting.address,
            secret=secret,
            meet_s=meet_s,
            trials=known_trials(),
        )
        for rank in range(1, size)
        if place is None
    ]
    reports = open_line(context, zmq.ROUTER)
    return _Lines(context=context, meeting=meeting, reports=reports, processes=FollowerProcesses(jobs))


def _free_port(host: str) -> int:
    """A port on which nobody listens; the engines bind it in a moment."""
    family = socket.getaddrinfo(host, None)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.bind(("", 0))
        return int(held.getsockname()[1])
