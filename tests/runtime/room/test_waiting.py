"""Keys take turns, kinds leave processes to each other, and jobs wait within bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rota.runtime.room.job import Kind, QueueBounds, RoomJob
from rota.runtime.room.room import Waiting


def work(_tools: object, part: bytes) -> bytes:
    return part


WIDE = QueueBounds(9, 99)
KIND = Kind(work=work, wall_s=1.0, of_key=WIDE, of_all=WIDE)
LONG = replace(KIND, wall_s=60.0, spares=1)


def waiting_for(keys: str, processes: int = 9, kind: Kind = KIND, size: int = 1) -> Waiting:
    waiting = Waiting(processes, only_key="")
    for key in keys:
        waiting.add(RoomJob(key, kind, (bytes(size),)))
    return waiting


def taken(waiting: Waiting) -> list[RoomJob]:
    return list(iter(waiting.take, None))


def test_keys_take_turns():
    assert [job.key for job in taken(waiting_for("aaabbc"))] == ["a", "b", "c", "a", "b", "a"]


def test_a_key_leaves_a_process_to_others_and_takes_it_when_one_of_its_jobs_has_ended():
    waiting = waiting_for("aab", processes=2)
    first, other = taken(waiting)
    assert (first.key, other.key) == ("a", "b")
    waiting.finished(first)
    assert [job.key for job in taken(waiting)] == ["a"]


def test_without_keys_all_processes_may_have_jobs():
    waiting = Waiting(2, only_key="anyone")
    for _ in range(3):
        waiting.add(RoomJob("anyone", KIND, (b"",)))
    assert len(taken(waiting)) == 2


def test_a_key_leaves_one_of_the_processes_of_a_kind_to_others():
    waiting = waiting_for("aab", processes=3, kind=LONG)
    assert [job.key for job in taken(waiting)] == ["a", "b"]


def test_a_kind_of_long_jobs_leaves_a_process_to_short_ones_of_the_same_keys():
    waiting = waiting_for("abc", processes=2, kind=LONG)
    waiting.add(RoomJob("b", KIND, (b"",)))
    assert [(job.key, job.kind) for job in taken(waiting)] == [("a", LONG), ("b", KIND)]


@pytest.mark.parametrize(
    ("of_key", "of_all", "has_room"),
    [
        (QueueBounds(3, 100), QueueBounds(4, 100), True),
        (QueueBounds(2, 100), QueueBounds(4, 100), False),
        (QueueBounds(3, 20), QueueBounds(4, 100), False),
        (QueueBounds(3, 100), QueueBounds(3, 100), False),
        (QueueBounds(3, 100), QueueBounds(4, 30), False),
    ],
)
def test_jobs_wait_within_bounds_but_the_first_of_a_key_always_may(
    of_key: QueueBounds, of_all: QueueBounds, has_room: bool
):
    kind = replace(KIND, of_key=of_key, of_all=of_all)
    waiting = waiting_for("aab", kind=kind, size=10)

    assert waiting.has_room(RoomJob("a", kind, (b"x",))) is has_room
    assert waiting.has_room(RoomJob("c", kind, (bytes(1000),)))
