"""An adapter that several replicas are asked for, whatever they answer and in whatever order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.errors import FaultCode
from rota.core.events import AdapterRefused, AdapterRemoved, Event, HostChanged, HostState
from rota.core.ids import AdapterId, EngineId
from rota.core.messages import AddAdapter, Message, RemoveAdapter, SealAdapter
from rota.runtime.promises import Promises
from rota.runtime.replicas.adapters import ReplicaAdapters
from tests.builders import add_adapter
from tests.runtime.replicas.fakes import FakeReplica, added, desk_of, kinds, refused, removed

REMOVE = RemoveAdapter(adapter_id=AdapterId(1), at=2.0)


class Stage:
    """Two replicas, what they were told, and which of them are down."""

    def __init__(self, replicas: int = 2) -> None:
        self.told: list[tuple[int, Message]] = []
        self.down: set[int] = set()
        self.numbers = range(replicas)
        self.book = ReplicaAdapters(self._tell)

    def _tell(self, replica: int, message: Message) -> bool:
        if replica in self.down:
            return False
        self.told.append((replica, message))
        return True

    def add(self) -> bool:
        return self.book.add(add_adapter(1), self.numbers)

    def removals(self) -> list[tuple[int, bool]]:
        return [(number, message.is_forced) for number, message in self.told if isinstance(message, RemoveAdapter)]


def test_a_client_hears_of_an_adapter_once_all_replicas_have_it():
    stage = Stage()
    stage.add()

    assert stage.book.note(1, added(1)) == []
    assert kinds(stage.book.note(0, added(1))) == ["AdapterAdded"]
    assert [number for number, _ in stage.told] == [0, 1]


def test_an_adapter_that_one_replica_refuses_is_taken_from_the_others_and_refused():
    stage = Stage(3)
    stage.add()
    assert stage.book.note(0, added(1)) == []
    assert stage.book.note(1, refused(1, 1, "It is broken.")) == []
    assert stage.removals() == [(0, True), (2, True)]

    assert stage.book.note(0, removed(1)) == []
    assert stage.book.note(2, added(1)) == []
    [told] = stage.book.note(2, removed(1))
    assert isinstance(told, AdapterRefused)
    assert told.reason == "It is broken."
    assert not stage.book.lacking(AdapterId(1), [0, 1, 2])


def test_a_removal_is_answered_once_all_replicas_have_answered_it():
    stage = Stage()
    stage.add()
    for number in (0, 1):
        stage.book.note(number, added(1))

    assert stage.book.remove(REMOVE, stage.numbers) == []
    assert stage.book.note(0, removed(1)) == []
    assert kinds(stage.book.note(1, removed(1))) == ["AdapterRemoved"]
    assert kinds(stage.book.remove(REMOVE, stage.numbers)) == ["AdapterRefused"]


def test_an_adapter_that_is_removed_while_it_is_read_answers_both_who_added_and_who_removed():
    stage = Stage()
    stage.add()
    assert stage.book.remove(REMOVE, stage.numbers) == []
    assert stage.book.note(0, added(1)) == []
    assert kinds(stage.book.note(1, added(1))) == ["AdapterAdded"]
    assert stage.book.note(1, removed(1)) == []
    assert kinds(stage.book.note(0, removed(1))) == ["AdapterRemoved"]


def test_a_replica_that_cannot_read_an_adapter_again_leaves_it_to_the_others_until_none_has_it():
    stage = Stage()
    stage.add()
    for number in (0, 1):
        stage.book.note(number, added(1))

    [lost_by_one] = stage.book.note(0, refused(1))
    assert lost_by_one.others_serve
    assert stage.book.lacking(AdapterId(1), stage.numbers) == [0]
    [lost_by_all] = stage.book.note(1, refused(1, 1))
    assert not lost_by_all.others_serve
    [lost_again] = stage.book.note(0, refused(1))  # by the next engine, too
    assert not lost_again.others_serve
    assert kinds(stage.book.note(0, added(1))) == ["AdapterAdded"]  # a later engine could read it
    assert stage.book.note(1, added(1)) == []
    assert stage.book.lacking(AdapterId(1), stage.numbers) == []


def test_a_replica_that_is_down_is_not_asked_and_none_that_is_up_is_an_error():
    stage = Stage()
    stage.down = {0}
    assert stage.add()
    assert kinds(stage.book.note(1, added(1))) == ["AdapterAdded"]

    stage.down = {0, 1}
    assert not stage.book.add(add_adapter(2), stage.numbers)


def test_adapters_of_a_replica_that_was_given_up_on_are_lost_only_if_no_other_has_them():
    stage = Stage()
    stage.add()
    for number in (0, 1):
        stage.book.note(number, added(1))

    assert stage.book.note_down(0, "It stays down.") == []
    [lost] = stage.book.note_down(1, "It stays down.")
    assert (lost.adapter_id, lost.reason) == (1, "It stays down.")


class Replica:
    """What a supervised engine says of one adapter: the truth, an answer to each message, and at a death to all."""

    def __init__(self) -> None:
        self.unread: list[Message] = []
        self.has = False
        self.is_known = False  # every new engine will try to read it

    def answer(self, can_read: bool) -> list[Event]:
        match self.unread.pop(0):
            case AddAdapter():
                self.has = self.is_known = can_read
                return [added(1)] if can_read else [refused(1)]
            case RemoveAdapter():
                had, self.has, self.is_known = self.has, False, False
                return [removed(1)] if had else [refused(1)]
        raise AssertionError

    def die(self, can_read_again: bool) -> list[Event]:
        """Promises: what was being added is refused, what was being removed is removed, the rest is read again."""
        asked, self.unread = {type(message) for message in self.unread}, []
        events: list[Event] = [refused(1)] if AddAdapter in asked else []
        events += [removed(1)] if RemoveAdapter in asked else []
        self.is_known = self.is_known and RemoveAdapter not in asked
        self.has = False
        if self.is_known:
            self.has = can_read_again
            events.append(added(1) if can_read_again else refused(1))
        return events


@given(st.integers(2, 4), st.booleans(), st.randoms(use_true_random=False))
def test_whatever_replicas_do_an_adapter_is_everywhere_or_nowhere_and_every_question_is_answered(
    count, is_removed, dice
):
    replicas = [Replica() for _ in range(count)]
    numbers = range(len(replicas))

    def tell(number: int, message: Message) -> bool:
        replicas[number].unread.append(message)
        return True

    book, told, deaths = ReplicaAdapters(tell), list[Event](), 0
    assert book.add(add_adapter(1), numbers)
    removal_is_due = is_removed
    while removal_is_due or any(replica.unread for replica in replicas):
        busy = [number for number in numbers if replicas[number].unread]
        deed = dice.choice(["answer", "answer", "die"] * bool(busy) + ["remove"] * removal_is_due)
        if deed == "remove":
            removal_is_due = False
            told += book.remove(REMOVE, numbers)
            continue
        number, can_read = dice.choice(busy), dice.random() < 0.7
        deaths += deed == "die"
        for event in replicas[number].answer(can_read) if deed == "answer" else replicas[number].die(can_read):
            told += book.note(number, event)

    whole = [event for event in told if not getattr(event, "others_serve", False)]
    holders = {number for number in numbers if replicas[number].has}
    assert deaths or len(whole) == 1 + is_removed
    if is_removed:
        assert isinstance(whole[-1], AdapterRemoved | AdapterRefused)
    if is_removed or isinstance(whole[0], AdapterRefused):
        assert not holders
    elif holders:
        assert {*book.lacking(AdapterId(1), numbers)} == {*numbers} - holders


class Supervised:
    """A replica with a supervisor's promises: its engine answers each message, and a new one is told what is known."""

    def __init__(self) -> None:
        self.promises = Promises()
        self.unread: list[Message] = []
        self.has = False

    def send(self, message: Message) -> None:
        self.promises.note_message(message)
        self.unread.append(message)

    def answer(self, can_read: bool) -> list[Event]:
        match self.unread.pop(0):
            case AddAdapter():
                self.has = can_read
                event: Event = added(1) if can_read else refused(1)
            case RemoveAdapter():
                event = removed(1) if self.has else refused(1)
                self.has = False
        self.promises.note_events([event])
        return [event]

    def die(self) -> list[Event]:
        self.has = False
        introductions, events = self.promises.introductions(), self.promises.break_all("It died.")
        self.unread = [*introductions]
        return events


class Cluster:
    """Replicas that join late, lose their place, die and answer, in any order."""

    def __init__(self, count: int, dice) -> None:
        self.replicas = [Supervised() for _ in range(count)]
        self.dice = dice
        self.book = ReplicaAdapters(self._tell)
        self.told: list[Event] = []

    def _tell(self, number: int, message: Message) -> bool:
        self.replicas[number].send(message)
        return True

    @property
    def busy(self) -> list[int]:
        return [number for number, one in enumerate(self.replicas) if one.unread]

    def act(self, may_remove: bool) -> bool:
        """One deed of one replica; True if the adapter was removed instead."""
        deeds = [self.answer, self.answer, self.lose_place, self.die] * bool(self.busy)
        deeds += [self.join] * (len(self.replicas) < 5) + [self.remove] * may_remove
        deed = self.dice.choice(deeds)
        deed()
        return deed == self.remove

    def answer(self) -> None:
        number = self.dice.choice(self.busy)
        self.book.away -= {number}  # whoever answers has a place
        self._hear(number, self.replicas[number].answer(self.dice.random() < 0.7))

    def die(self) -> None:
        number = self.dice.choice(self.busy)
        self._hear(number, self.replicas[number].die())

    def lose_place(self) -> None:
        number = self.dice.choice(self.busy)
        if number not in self.book.away:
            self.book.away |= {number}
            self.told += self.book.note_away(number, "No GPU is free.")

    def join(self) -> None:
        self.replicas.append(Supervised())
        self.book.away |= {len(self.replicas) - 1}
        self.book.introduce(len(self.replicas) - 1, 0.0)

    def remove(self) -> None:
        self.told += self.book.remove(REMOVE, range(len(self.replicas)))

    def _hear(self, number: int, events: list[Event]) -> None:
        for event in events:
            self.told += self.book.note(number, event)

    def check(self) -> None:
        """Who waits for an answer waits for a replica that has a place."""
        if entry := self.book._entries.get(AdapterId(1)):
            awaited = entry.asked | entry.leaving
            assert not awaited & self.book.away
            assert awaited or not (entry.is_add_open or entry.is_removal_open)


@settings(max_examples=300)
@given(st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False))
def test_whoever_joins_dies_or_loses_its_place_an_adapter_ends_everywhere_or_nowhere(count, is_removed, dice):
    cluster, removal_is_due = Cluster(count, dice), is_removed
    assert cluster.book.add(add_adapter(1), range(count))
    while removal_is_due or cluster.busy:
        removal_is_due = not cluster.act(removal_is_due) and removal_is_due
        cluster.check()

    numbers = range(len(cluster.replicas))
    answers = [event for event in cluster.told if not getattr(event, "others_serve", False)]
    assert answers, "nobody heard of the adapter"
    holders = {number for number in numbers if cluster.replicas[number].has}
    if is_removed or not cluster.book._entries:
        assert not holders
    else:
        assert {*cluster.book.lacking(AdapterId(1), numbers)} == {*numbers} - holders


# ── adapters that engines died of ─────────────────────────────────────────────────────────────────────────────────────


def set_aside(engine: int) -> AdapterRefused:
    return replace(refused(1, engine), code=FaultCode.QUARANTINED)


def removals(replicas: list[FakeReplica]) -> list[int]:
    return [sum(isinstance(message, RemoveAdapter) for message in one.sent) for one in replicas]


def test_one_that_serves_is_taken_from_every_replica_and_a_client_hears_of_it_once():
    desk, replicas = desk_of(3)
    desk.send(add_adapter(1))
    for number in range(3):
        desk.note(number, [added(1, number)])
    heard = desk.note(1, [set_aside(1)])
    assert [(event.code, event.others_serve) for event in heard] == [(FaultCode.QUARANTINED, False)]
    assert removals(replicas) == [1, 1, 1]
    later = [*desk.note(0, [removed(1, 0)]), *desk.note(2, [removed(1, 2)]), *desk.note(1, [set_aside(1)])]
    later += desk.note(1, [refused(1, 1)])
    assert [event for event in later if isinstance(event, AdapterRefused)] == []


def test_one_that_is_being_added_is_refused_by_all():
    desk, replicas = desk_of(2)
    desk.send(add_adapter(1))
    desk.note(0, [added(1, 0)])
    heard = [*desk.note(1, [set_aside(1)]), *desk.note(0, [removed(1, 0)]), *desk.note(1, [refused(1, 1)])]
    assert kinds(heard).count("AdapterRefused") == 1
    assert heard[-1].code is FaultCode.QUARANTINED
    assert removals(replicas) == [1, 1]


# ── the first read is the version for all ─────────────────────────────────────────────────────────────────────────────


def held(engine: int, *seals: str) -> HostChanged:
    return HostChanged(
        at=1.0, adapter_id=AdapterId(1), state=HostState.HELD, engine_id=EngineId(engine), size_bytes=9, seals=seals
    )


def told(replicas: list[FakeReplica]) -> list[list[tuple[str, ...]]]:
    return [[message.seals for message in one.sent if isinstance(message, SealAdapter)] for one in replicas]


def test_the_others_hear_of_the_first_read_and_not_of_later_ones():
    desk, replicas = desk_of(3)
    desk.send(add_adapter(1))
    desk.note(0, [added(1, 0)])
    heard = desk.note(1, [held(1, "first"), added(1, 1)])
    desk.note(0, [held(0, "other")])
    desk.note(1, [held(1, "first")])

    assert told(replicas) == [[("first",)], [], [("first",)]]
    assert kinds(heard) == ["HostChanged"], "observers hear of it as before"


def test_a_replica_that_comes_later_is_told_with_the_adapter():
    sent = list[tuple[int, object]]()
    adapters = ReplicaAdapters(lambda number, message: sent.append((number, message)) or True)
    adapters.add(add_adapter(1), [0])
    adapters.seal(0, held(0, "first"))
    adapters.introduce(1, at=2.0)

    [seals] = [message.adapter.seals for number, message in sent if number == 1 and isinstance(message, AddAdapter)]
    assert seals == ("first",)
