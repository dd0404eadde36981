"""Rank 0 brings the ranks together, leads them as one device, and listens to what they say of adapters."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import zmq

from rota.core.adapter import Adapter
from rota.core.capacity import Capacity
from rota.core.config import EngineConfig
from rota.core.errors import ConfigError, EngineDiedError, RotaError
from rota.core.grammar import Grammar
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFailed, AdapterFetched, AdapterReady, Message
from rota.core.plan import StepPlan, StepResult
from rota.core.stages import Stage
from rota.runtime.heartbeat import BEAT_S
from rota.runtime.ranks.meeting import MEET_S, MakeDevice, Meeting, Socket, facts, open_line
from rota.runtime.ranks.processes import FollowerJob, FollowerProcesses, LaunchedProcess, torchrun_place
from rota.runtime.timeouts import EngineTimeouts, Silence
from rota.runtime.wire import Alive, Building, Failed, Ready, decode
from rota.runtime.world import Device, Ticket
from rota.start import START

# ── agreement ───────────────────────────────────────────────────────────────────────────────────────────────────────
# Ranks agree on adapters: what the scheduler hears of an adapter is what all ranks have said.
#
# Rank 0 may have read an adapter that another rank cannot read, and its own copy into a slot says nothing of the
# others.

Outcome = AdapterFetched | AdapterReady | AdapterFailed
Post = Callable[[Message], None]


@dataclass(slots=True)
class AdapterOrder:
    """An adapter is to be read, or copied into a slot, by every rank."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    is_told: bool = False

    @property
    def failures(self) -> list[tuple[int, AdapterFailed]]:
        return [(rank, said) for rank, said in sorted(self.outcomes.items()) if isinstance(said, AdapterFailed)]


class Agreement:
    """Each order ends in one message, once every rank has said how its own part ended; from any thread."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._ranks = frozenset(ranks)
        self._lock = threading.Lock()
        self._post: Post | None = None
        self._reads: dict[AdapterId, deque[AdapterOrder]] = {}
        self._copies: dict[AdapterId, deque[AdapterOrder]] = {}
        self._to_forget: list[AdapterId] = []

    def listen(self, post: Post) -> None:
        """Tell what was agreed through `post`; it replaces the one given before."""
        self._post = post

    def order(self, plan: StepPlan) -> StepPlan:
        """Expect the outcomes of a plan, before any rank has the plan; gives the plan with what must be forgotten."""
        with self._lock:
            for adapter in plan.reads:
                self._reads.setdefault(adapter.adapter_id, deque()).append(AdapterOrder())
            for load in plan.loads:
                self._copies.setdefault(load.adapter_id, deque()).append(AdapterOrder())
            forgotten, self._to_forget = self._to_forget, []
        return replace(plan, drops=(*plan.drops, *forgotten)) if forgotten else plan

    def note(self, rank: int, message: Message) -> None:
        """A rank has done its part of an order, or could not. A rank's outcomes come in the order of its orders."""
        assert isinstance(message, Outcome), "a device tells only of adapters"
        with self._lock:
            for orders in self._kinds(message):
                waiting = orders.get(message.adapter_id, ())
                if order := next((order for order in waiting if rank not in order.outcomes), None):
                    order.outcomes[rank] = message
                    return self._settle(orders, message.adapter_id, order)

    def _kinds(self, message: Outcome) -> Iterable[dict[AdapterId, deque[AdapterOrder]]]:
        """Which orders a message may be of. A failure is that of a read if a read is under way."""
        match message:
            case AdapterFetched():
                return (self._reads,)
            case AdapterReady():
                return (self._copies,)
            case AdapterFailed():
                return (self._reads, self._copies)

    def _settle(self, orders: dict[AdapterId, deque[AdapterOrder]], adapter_id: AdapterId, order: AdapterOrder) -> None:
        is_complete = order.outcomes.keys() == self._ranks
        if is_complete:
            orders[adapter_id].popleft()  # each rank speaks in order, so the oldest order is the first to be complete
            if not orders[adapter_id]:
                del orders[adapter_id]
        if is_complete and orders is self._reads and 0 < len(order.failures) < len(self._ranks):
            # Before the scheduler hears: the plan that orders the next read must also drop what some have read.
            self._to_forget.append(adapter_id)
        # A copy that failed is told at once: a step may have used its slot, and must not be taken for the adapter's.
        has_failed = orders is self._copies and bool(order.failures)
        if (is_complete or has_failed) and not order.is_told:
            order.is_told = True
            assert self._post is not None, "`listen` is called before the first plan"
            self._post(_agreed(order))


def _agreed(order: AdapterOrder) -> Outcome:
    """The failure of the first rank that failed, or the word of the last that was ready.

    The longest copy counts, and so do the most pages.
    """
    if order.failures:
        rank, failure = order.failures[0]
        return replace(failure, reason=f"Rank {rank}: {failure.reason}") if rank else failure
    last = max(order.outcomes.values(), key=lambda outcome: outcome.at)
    if isinstance(last, AdapterReady):
        copies = (said.copy_s for said in order.outcomes.values() if isinstance(said, AdapterReady))
        return replace(last, copy_s=max(copies))
    if isinstance(last, AdapterFetched):
        reads = [one for _, one in sorted(order.outcomes.items()) if isinstance(one, AdapterFetched)]
        return replace(
            last,
            pages=max(one.pages for one in reads),
            matrices=max(one.matrices for one in reads),
            size_bytes=sum(one.size_bytes for one in reads),
            seals=tuple(seal for one in reads for seal in one.seals),
        )
    return last


# ── listener ────────────────────────────────────────────────────────────────────────────────────────────────────────
# The leader listens to its followers in a thread: what they say of adapters, and whether they are still there.

# A process that ended may have left its last words in the socket.
_LOOK_S, _LATE_S = 0.2, 0.05
_KILLED_S = 0.3
# A device that fails because another rank is gone fails at once, and the thread below hears why a moment later.
_REASON_S = 2.0


class ReportListener:
    """Owns the socket of reports. `end` is called in its thread, with the reason why the ranks cannot go on."""

    def __init__(
        self,
        socket: Socket,
        names: Mapping[bytes, int],
        agreement: Agreement,
        processes: FollowerProcesses,
        end: Callable[[str], None],
        timeouts: EngineTimeouts,
    ) -> None:
        self._socket = socket
        self._names = names
        self._agreement = agreement
        self._processes = processes
        self._end = end
        self._silences = {rank: Silence(timeouts) for rank in names.values()}
        self._capacities: dict[int, Capacity] = {}
        self._changed = threading.Condition()
        self._lost = ""
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="rota-ranks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def capacities(self) -> dict[int, Capacity]:
        """What the followers can hold; waits until all have built. A follower that takes too long is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost or len(self._capacities) == len(self._silences))
        self.check()
        return self._capacities

    def check(self, wait_s: float = 0.0) -> None:
        """Raise if a follower is lost."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._lost), wait_s)
        if self._lost:
            raise EngineDiedError(self._lost)

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()

    def _listen(self) -> None:
        while not self._is_closing.is_set() and not self._lost:
            complaint = self._processes.complaint()
            self._hear_all(_LATE_S if complaint else _LOOK_S)
            complaint = complaint or self._silent()
            if complaint and not self._is_closing.is_set():
                self._lose(complaint)
        self._socket.close()

    def _hear_all(self, wait_s: float) -> None:
        began_at = time.monotonic()
        while self._socket.poll(int(wait_s * 1000.0)):
            name, packet = self._socket.recv_multipart()
            if name in self._names:
                self._hear(self._names[name], decode(packet))
            wait_s = 0.0
        for silence in self._silences.values():
            silence.spend(min(_LOOK_S, time.monotonic() - began_at))

    def _hear(self, rank: int, records: list[Any]) -> None:
        self._silences[rank].hear(records)
        for record in records:
            match record:
                case Ready(capacity):
                    with self._changed:
                        self._capacities[rank] = capacity
                        self._changed.notify_all()
                case Failed(reason):
                    # A rank that is killed makes those fail that compute with it, and they may be heard first.
                    self._lose(self._processes.killed(_KILLED_S) or f"Rank {rank}: {reason}")
                case Building() | Alive():
                    pass
                case message:
                    self._agreement.note(rank, message)

    def _silent(self) -> str:
        """A rank that hangs makes those wait that compute with it, so all silent ranks are named."""
        complaint = next(filter(None, (silence.complaint for silence in self._silences.values())), "")
        if not complaint:
            return ""
        silent = [str(rank) for rank, silence in self._silences.items() if silence.left_s < 2 * BEAT_S]
        return f"No word from rank {' and '.join(silent)}. {complaint}"

    def _lose(self, reason: str) -> None:
        if self._lost or self._is_closing.is_set():
            return
        with self._changed:
            self._lost = reason
            self._changed.notify_all()
        self._processes.kill()  # else a device that waits for a rank that hangs would wait for ever
        self._end(reason)


# ── leader ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# The leader is a device: every plan goes to the followers first and then to its own engine.


class Leader(Device[Ticket]):
    """Rank 0's device and, behind it, those of all other ranks. The loop does not know."""

    def __init__(
        self,
        device: Device[Ticket],
        capacity: Capacity,
        meeting: Meeting,
        agreement: Agreement,
        listener: ReportListener,
        hang_up: Callable[[], None],
    ) -> None:
        self._device = device
        self._capacity = capacity
        self._meeting = meeting
        self._agreement = agreement
        self._listener = listener
        self._hang_up = hang_up

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Rank 0's: no rank is ready before the others."""
        return self._device.stages

    def listen(self, post: Callable[[Message], None]) -> None:
        self._agreement.listen(post)
        self._device.listen(partial(self._agreement.note, 0))

    def check(self, adapter: Adapter) -> str:
        """Rank 0's files speak for all: a rank that cannot read the adapter says so when it does."""
        return self._device.check(adapter)

    def prepare(self, grammar: Grammar, then: Callable[[], None]) -> bool:
        """Rank 0 alone follows grammars."""
        return self._device.prepare(grammar, then)

    def submit(self, plan: StepPlan) -> Ticket:
        self._listener.check()
        plan = self._agreement.order(plan)
        try:
            self._meeting.send_plan(plan)
            return self._device.submit(plan)
        except Exception:  # whatever it is, it goes on; but a follower that is lost is the better reason
            self._listener.check(_REASON_S)
            raise

    def collect(self, ticket: Ticket) -> StepResult:
        try:
            return self._device.collect(ticket)
        except Exception:  # as above
            self._listener.check(_REASON_S)
            raise

    def dismiss(self) -> None:
        """Let the followers end; no plan may follow."""
        self._listener.close()
        self._meeting.dismiss()
        self._hang_up()

    def close(self) -> None:
        self.dismiss()
        self._device.close()


# ── lead ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# Rank 0 brings the ranks together: it starts or awaits the others, meets them, builds with them, and leads.

_HERE = "127.0.0.1"
# Ranks may have found different amounts of these; the ledgers then use the least. All else must be equal.
_LEAST = ("blocks", "slots")
# Told to users, and used by no ledger; and what rank 0 took when it was tried, since its scheduler decides.
_OF_RANK_0 = ("adapter_bytes", "slot_bytes", "slots_from", "rank_from", "decode_s", "token_s")


def build_ranks(make_device: MakeDevice, config: EngineConfig, timeouts: EngineTimeouts | None = None) -> Device[Any]:
    """The device of a config: one rank's own, or that of all ranks together if they have not met yet."""
    if config.model.tensor_parallel_size == 1 or config.meeting:
        return make_device(config)
    place = torchrun_place(config.model.tensor_parallel_size, os.environ)
    return lead(make_device, config, timeouts or EngineTimeouts(), place)


def lead(
    make_device: MakeDevice,
    config: EngineConfig,
    timeouts: EngineTimeouts,
    place: LaunchedProcess | None,
    meet_s: float = MEET_S,
) -> Leader[Any]:
    """Build all ranks; returns once every rank is ready. The thread that calls it must live as long as the ranks."""
    size, host = config.model.tensor_parallel_size, place.host if place else _HERE
    if place is None:
        config = replace(config, local_ranks=size)
    else:
        config = replace(config, device_number=place.device_number, local_ranks=place.local_ranks)
    secret = "" if place else secrets.token_hex(16)
    with ExitStack() as lines:  # a start that fails leaves no process and no port behind
        context: zmq.Context[Socket] = zmq.Context()
        lines.callback(context.term)
        meeting = Meeting(context, size, f"tcp://*:{place.port}" if place else f"tcp://{_HERE}:*", secret)
        lines.callback(meeting.close)
        reports = open_line(context, zmq.ROUTER)
        lines.callback(reports.close)
        job = FollowerJob(
            make_device=make_device,
            config=config,
            address=meeting.address,
            secret=secret,
            meet_s=meet_s,
            autotuned=START.autotuned,
        )
        processes = FollowerProcesses([] if place else _jobs(job))
        lines.callback(processes.end)
        meeting.gather(processes.complaint, meet_s)
        meeting.compare(facts(config))
        config = replace(config, meeting=f"tcp://{host}:{_free_port(host)}")
        port = reports.bind_to_random_port("tcp://*" if place else f"tcp://{_HERE}")
        names = meeting.welcome(config.meeting, f"tcp://{host}:{port}")
        agreement = Agreement(range(size))
        listener = ReportListener(reports, names, agreement, processes, START.end_with, timeouts)
        listener.start()
        lines.callback(listener.close)
        device = _built(make_device, config, listener)
        capacity = agree({0: device.capacity, **listener.capacities()})
        return Leader(device, capacity, meeting, agreement, listener, lines.pop_all().close)


def _jobs(job: FollowerJob) -> list[FollowerJob]:
    """What each follower on this machine must know. Progress bars of several processes would overwrite each other."""
    config = replace(job.config, quiet=True)
    first, size = config.device_number, config.model.tensor_parallel_size
    configs = [replace(config, rank=rank, device_number=first + rank) for rank in range(1, size)]
    return [replace(job, config=one) for one in configs]


def _built(make_device: MakeDevice, config: EngineConfig, listener: ReportListener) -> Device[Any]:
    try:
        return make_device(config)
    except RotaError:
        raise  # it says what is wrong, on this rank and most likely on all
    except Exception:  # whatever it is, it goes on; but a follower that is lost is the better reason
        listener.check(_REASON_S)
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


def _free_port(host: str) -> int:
    """A port on which nobody listens; the engines bind it in a moment."""
    family = socket.getaddrinfo(host, None)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.bind(("", 0))
        return int(held.getsockname()[1])
