"""An adapter is added to all replicas or to none, and a client hears of that once."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from functools import lru_cache

from rota.core.adapter import Adapter
from rota.core.errors import Fault, FaultCode
from rota.core.events import AdapterAdded, AdapterRefused, AdapterRemoved, Event, HostChanged
from rota.core.ids import AdapterId
from rota.core.messages import AddAdapter, Message, RemoveAdapter, SealAdapter

# Sends a message to a replica; False if that replica is down.
Tell = Callable[[int, Message], bool]
AdapterNews = AdapterAdded | AdapterRefused | AdapterRemoved
Numbers = frozenset[int]  # of replicas
NONE: Numbers = frozenset()


@lru_cache(1024)
def _shared(numbers: Numbers) -> Numbers:
    """The same set for the same replicas: thousands of adapters are held by all of them, and a set takes 200 bytes."""
    return numbers


@dataclass(slots=True)
class _ReplicatedAdapter:
    """One adapter: which replicas have it, which were asked about it, and which answers a client waits for."""

    adapter: Adapter
    asked: Numbers = NONE  # have not answered whether they can serve it
    invited: Numbers = NONE  # have not either, but no client waits for their answers
    unsure: Numbers = NONE  # of the invited, those that were asked first: see `note_away`
    holders: Numbers = NONE
    leaving: Numbers = NONE  # have not answered its removal
    refusal: AdapterRefused | None = None  # the first one
    is_add_open: bool = True
    is_removal_open: bool = False
    was_removed: bool = False


class ReplicaAdapters:
    """Callers hold a lock. Replicas are numbered from 0.

    A replica that dies refuses the adapters that it was reading, so such an adapter is refused everywhere: the adapter
    may be what killed the replica, and it must not kill each replica again and again.

    A replica that is away is told of adapters too, but no client waits for its answers: it may come late, or never.
    One that cannot read an adapter then lacks it, like a replica that cannot read it again after a restart.
    """

    def __init__(self, tell: Tell) -> None:
        self.away: Set[int] = frozenset()
        self._tell = tell
        self._entries: dict[AdapterId, _ReplicatedAdapter] = {}

    def add(self, message: AddAdapter, replicas: Iterable[int]) -> bool:
        """Ask these replicas for an adapter; False if none of them is up."""
        present, away = self._parted(replicas)
        entry = _ReplicatedAdapter(message.adapter, asked=self._told(present, message))
        if not entry.asked:
            return False
        self._entries[message.adapter.adapter_id] = entry
        self._invite(entry, away, message.at)
        return True

    def introduce(self, replica: int, at: float) -> None:
        """Tell a new replica of every adapter that is not about to leave."""
        for entry in self._entries.values():
            if not (entry.leaving or entry.refusal or entry.is_removal_open):
                self._invite(entry, [replica], at)

    def remove(self, message: RemoveAdapter, replicas: Iterable[int]) -> list[Event]:
        """Take an adapter from all replicas. What can be answered at once is answered here."""
        entry = self._entries.get(message.adapter_id)
        if entry is None:
            reason = f"No adapter with the id {message.adapter_id} is known."
            return [AdapterRefused(adapter_id=message.adapter_id, at=message.at, reason=reason)]
        entry.is_removal_open = True
        self._take_back(entry, replicas, message)
        return list(self._settle(message.adapter_id, entry, message.at))

    def lacking(self, adapter_id: AdapterId, replicas: Collection[int]) -> list[int]:
        """Those of the replicas that cannot serve a known adapter: they could not read it again after a restart.

        Of an adapter that leaves, also those that it has left already.
        """
        entry = self._entries.get(adapter_id)
        if entry is None or entry.holders.issuperset(replicas):
            return []
        return [number for number in replicas if number not in entry.holders and number not in entry.asked]

    def fault_of(self, adapter_id: AdapterId) -> Fault | None:
        """Why no replica takes requests for an adapter: one has refused it, and the others are about to forget it."""
        entry = self._entries.get(adapter_id)
        return _fault_of(entry.refusal) if entry and entry.refusal else None

    def note(self, replica: int, event: AdapterNews) -> list[Event]:
        """What a client hears of a replica's news: nothing, or the end of what the client asked for."""
        entry = self._entries.get(event.adapter_id)
        if entry is None:
            return []  # the answer to a removal that this class ordered, after another replica's refusal
        match event:
            case AdapterAdded():
                return self._added(replica, entry, event)
            case AdapterRefused():
                return self._refused(replica, entry, event)
            case AdapterRemoved():
                self._part(replica, entry)
                entry.was_removed = True
                return list(self._settle(event.adapter_id, entry, event.at))

    def seal(self, replica: int, event: HostChanged) -> None:
        """A replica has read an adapter. What the first one found is the version, for all others too."""
        entry = self._entries.get(event.adapter_id)
        if entry is None or entry.adapter.seals or not event.seals:
            return
        entry.adapter = replace(entry.adapter, seals=event.seals)
        others = (entry.asked | entry.invited | entry.holders) - {replica}
        self._told(sorted(others), SealAdapter(event.adapter_id, event.at, event.seals))

    def note_down(self, replica: int, reason: str) -> list[Event]:
        """A replica was given up on: adapters that no other replica has are lost."""
        now, events = time.monotonic(), list[Event]()
        for adapter_id, entry in list(self._entries.items()):
            was_holder = replica in entry.holders
            self._part(replica, entry)
            if _is_open(entry) or entry.refusal:
                events += self._settle(adapter_id, entry, now)
            elif was_holder and not entry.holders:
                events.append(AdapterRefused(adapter_id=adapter_id, at=now, reason=reason, code=FaultCode.ENGINE_DIED))
        return events

    def note_away(self, replica: int, reason: str) -> list[Event]:
        """A replica is away now: clients that wait for its answers get those of the others.

        An adapter that no other replica can answer for is refused. If others may serve it, this replica is invited
        once more should it refuse: a death before it has begun to read says nothing of the adapter.
        """
        now, events = time.monotonic(), list[Event]()
        for adapter_id, entry in list(self._entries.items()):
            if replica in entry.leaving:
                self._part(replica, entry)
                entry.was_removed = True
            elif replica in entry.asked:
                died = AdapterRefused(adapter_id=adapter_id, at=now, reason=reason, code=FaultCode.ENGINE_DIED)
                self._stand_back(replica, entry, died)
            else:
                continue
            events += self._settle(adapter_id, entry, now)
        return events

    def _stand_back(self, replica: int, entry: _ReplicatedAdapter, refusal: AdapterRefused) -> None:
        entry.asked = _without(entry.asked, replica)
        if entry.asked or entry.holders:
            entry.invited = _with(entry.invited, {replica})
            entry.unsure = _with(entry.unsure, {replica})
        else:
            entry.refusal = refusal
            self._take_back(entry, sorted({replica, *entry.invited}), _removal(refusal))

    def _added(self, replica: int, entry: _ReplicatedAdapter, event: AdapterAdded) -> list[Event]:
        """An adapter that was lost everywhere is back with the first replica that could read it again."""
        was_lost = not entry.holders and not _is_open(entry)
        entry.asked = _without(entry.asked, replica)
        entry.invited = _without(entry.invited, replica)
        entry.unsure = _without(entry.unsure, replica)
        entry.holders = _with(entry.holders, {replica})
        return [event] if was_lost else list(self._settle(event.adapter_id, entry, event.at))

    def _refused(self, replica: int, entry: _ReplicatedAdapter, event: AdapterRefused) -> list[Event]:
        if event.code is FaultCode.QUARANTINED:
            return self._set_aside(replica, entry, event)
        # One that has added it may die and lose it again before the others have answered; its next engine would try.
        has_lost = {replica} if entry.is_add_open and replica in entry.holders else NONE
        was_asked = replica in entry.asked or bool(has_lost)
        if replica in entry.unsure - entry.leaving:
            entry.unsure = _without(entry.unsure, replica)
            self._invite(entry, [replica], event.at)
            return []
        if not was_asked and replica not in entry.leaving:
            if _is_open(entry) or entry.leaving:
                entry.invited = _without(entry.invited, replica)
                return []  # it has refused the adapter before, and now its removal; or it lacks it from the beginning
            self._part(replica, entry)
            # A new engine could not read it again. Its requests go to the replicas that have it.
            return [replace(event, others_serve=bool(entry.holders))]
        # A removal on the way to this replica is answered too: the replica may die before it says so.
        self._part(replica, entry)
        if was_asked and entry.refusal is None:
            entry.refusal = event
            others = (entry.asked | entry.invited | entry.holders | has_lost) - entry.leaving
            self._take_back(entry, sorted(others), _removal(event))
        return list(self._settle(event.adapter_id, entry, event.at))

    def _set_aside(self, replica: int, entry: _ReplicatedAdapter, event: AdapterRefused) -> list[Event]:
        """No replica is to serve it, also not one that has read it before."""
        was_served, is_news = not _is_open(entry), entry.refusal is None
        entry.refusal, entry.unsure = entry.refusal or event, NONE
        others = (entry.asked | entry.invited | entry.holders | {replica}) - entry.leaving
        entry.asked, entry.invited = NONE, NONE
        self._take_back(entry, sorted(others), _removal(event))
        answers = list(self._settle(event.adapter_id, entry, event.at))
        return [event, *answers] if was_served and is_news else answers

    def _settle(self, adapter_id: AdapterId, entry: _ReplicatedAdapter, at: float) -> Iterator[Event]:
        """The answers that are complete: of the adding first, then of the removal."""
        if entry.asked or (entry.leaving and (entry.refusal or not entry.is_add_open)):
            return
        if entry.is_add_open:
            entry.is_add_open = False
            yield replace(entry.refusal, at=at) if entry.refusal else AdapterAdded(adapter_id, at)
        if entry.is_removal_open and not entry.leaving:
            reason = f"No replica has the adapter with the id {adapter_id}."
            refused = AdapterRefused(adapter_id=adapter_id, at=at, reason=reason)
            yield AdapterRemoved(adapter_id, at) if entry.was_removed else refused
        if (entry.refusal or entry.is_removal_open) and not entry.leaving:
            self._entries.pop(adapter_id, None)

    def _invite(self, entry: _ReplicatedAdapter, replicas: Iterable[int], at: float) -> None:
        invitation = AddAdapter(adapter=entry.adapter, at=at, is_known=True, is_read_later=True)
        entry.invited = _with(entry.invited, self._told(replicas, invitation))

    def _take_back(self, entry: _ReplicatedAdapter, replicas: Iterable[int], message: RemoveAdapter) -> None:
        """Tell replicas of a removal, and wait for the answers of those that are not away."""
        present, away = self._parted(replicas)
        entry.leaving = _with(entry.leaving, self._told(present, message))
        for replica in self._told(away, message):
            self._part(replica, entry)
            entry.was_removed = True  # no engine of a replica that is away has read it

    def _parted(self, replicas: Iterable[int]) -> tuple[list[int], list[int]]:
        present, away = list[int](), list[int]()
        for number in replicas:
            (away if number in self.away else present).append(number)
        return present, away

    def _told(self, replicas: Iterable[int], message: Message) -> Numbers:
        return _shared(frozenset(number for number in replicas if self._tell(number, message)))

    def _part(self, replica: int, entry: _ReplicatedAdapter) -> None:
        entry.asked = _without(entry.asked, replica)
        entry.invited = _without(entry.invited, replica)
        entry.unsure = _without(entry.unsure, replica)
        entry.holders = _without(entry.holders, replica)
        entry.leaving = _without(entry.leaving, replica)


def _with(numbers: Numbers, others: Set[int]) -> Numbers:
    return _shared(numbers | others)


def _without(numbers: Numbers, replica: int) -> Numbers:
    return _shared(numbers - {replica}) if replica in numbers else numbers


def _removal(refusal: AdapterRefused) -> RemoveAdapter:
    """Requests that wait for the adapter at other replicas end with the reason of the one that refused it."""
    return RemoveAdapter(adapter_id=refusal.adapter_id, at=refusal.at, is_forced=True, fault=_fault_of(refusal))


def _fault_of(refusal: AdapterRefused) -> Fault:
    return Fault(refusal.code, refusal.reason, "model")


def _is_open(entry: _ReplicatedAdapter) -> bool:
    return entry.is_add_open or entry.is_removal_open
