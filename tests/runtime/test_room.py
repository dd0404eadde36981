"""A room's processes can be ended in the middle of a job, know no secrets, and write nothing; keys take turns there."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rota.runtime.room.job import JobOutcome, JobReply, Kind, QueueBounds, RoomJob
from rota.runtime.room.room import FullError, Room, Waiting
from tests.processes import is_alive, run_program
from tests.waiting import TIMEOUT_S, until

# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def nothing(_: object) -> None:
    """What these jobs need at hand."""


def whose(_tools: object, _part: bytes) -> bytes:
    return b"%d" % os.getpid()


def match_for_ever(_tools: object, _part: bytes) -> bytes:
    re.fullmatch("([a-z0-9_.]+)+!", "model.layers.0.self_attn.q_proj" * 3)
    return b""


def die(_tools: object, _part: bytes) -> bytes:
    os.kill(os.getpid(), signal.SIGSEGV)
    return b""


def take_memory(_tools: object, part: bytes) -> bytes:
    return b"%d" % len(bytes(int(part)))


def write(_tools: object, part: bytes) -> bytes:
    Path(part.decode()).write_text("here")
    return b"written"


def tell_environment(_tools: object, _part: bytes) -> bytes:
    return repr(sorted(os.environ)).encode()


def fail(_tools: object, part: bytes) -> bytes:
    raise ZeroDivisionError(part.decode())


WHOSE = Kind(work=whose, wall_s=TIMEOUT_S)


def kind(work: object, **limits: float) -> Kind:
    return replace(WHOSE, work=work, **limits)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    room = Room(nothing)
    yield room
    pids = room.pids
    room.close()
    assert not any(map(is_alive, pids))


def reply(room: Room, kind: Kind, part: bytes = b"") -> JobReply:
    return room.submit("acme", kind, part).result(TIMEOUT_S)


def test_jobs_are_done_in_one_copy_until_it_must_be_ended(room):
    first, second = (reply(room, WHOSE).content for _ in range(2))
    assert first == second
    process = room.pids
    assert reply(room, kind(match_for_ever, cpu_s=0.2)).outcome is JobOutcome.TOO_LONG
    assert reply(room, WHOSE).content != first
    assert room.pids == process, "only the copy was ended"


def test_a_job_is_ended_by_the_clock_too(room):
    assert reply(room, kind(match_for_ever, wall_s=0.3)).outcome is JobOutcome.OVERDUE
    assert reply(room, WHOSE).outcome is JobOutcome.DONE


def test_a_job_that_crashes_takes_too_much_or_fails_says_so_and_the_next_is_done(room):
    assert reply(room, kind(die)).outcome is JobOutcome.DIED
    assert reply(room, kind(take_memory, memory_bytes=1 << 28), b"%d" % (1 << 30)).outcome is JobOutcome.TOO_LARGE
    failed = reply(room, kind(fail), b"oh")
    assert (failed.outcome, b"ZeroDivisionError: oh" in failed.content) == (JobOutcome.FAILED, True)
    assert reply(room, kind(take_memory), b"%d" % (1 << 20)) == JobReply(JobOutcome.DONE, b"1048576")


def test_a_process_can_write_nothing(room, tmp_path):
    asked = run_program([sys.executable, "-c", "from rota.runtime.room.confinement import lock_in; print(lock_in())"])
    if asked.stdout != "True\n":
        pytest.skip("this system has no Landlock")
    wrote = reply(room, kind(write), str(tmp_path / "file").encode())
    assert (wrote.outcome, b"PermissionError" in wrote.content) == (JobOutcome.FAILED, True)
    assert not (tmp_path / "file").exists()


def test_a_process_knows_no_secret_of_its_server(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_7d2e91")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "7d2e91")
    monkeypatch.setenv("HARMLESS", "1")
    room = Room(nothing)
    try:
        told = reply(room, kind(tell_environment)).content.decode()
        assert ("HARMLESS" in told, "HF_TOKEN" in told, "SECRET" in told) == (True, False, False)
        assert b"7d2e91" not in Path(f"/proc/{room.pids[0]}/environ").read_bytes()
    finally:
        room.close()


def test_a_process_that_is_killed_is_replaced(room):
    reply(room, WHOSE)
    (pid,) = room.pids
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: not is_alive(pid))
    assert reply(room, WHOSE).outcome is JobOutcome.DIED
    assert until(lambda: bool(room.pids)), "also before the next job"
    assert reply(room, WHOSE).outcome is JobOutcome.DONE


def test_too_many_jobs_are_refused_and_those_that_wait_when_it_closes_are_told():
    room = Room(nothing)
    few = replace(kind(match_for_ever), of_key=QueueBounds(1, 100))
    running = room.submit("acme", few, b"")
    assert until(running.running)
    waiting = room.submit("acme", few, b"")
    with pytest.raises(FullError):
        room.submit("acme", few, b"")
    room.close()
    assert {running.result().outcome, waiting.result().outcome} == {JobOutcome.STOPPING}
    assert room.submit("acme", few, b"").result().outcome is JobOutcome.STOPPING


def test_a_job_that_nobody_waits_for_any_more_is_not_done(room):
    running = room.submit("acme", kind(match_for_ever, wall_s=0.5), b"")
    given_up, kept = room.submit("acme", WHOSE, b""), room.submit("acme", WHOSE, b"")
    assert given_up.cancel()
    assert running.result(TIMEOUT_S).outcome is JobOutcome.OVERDUE
    assert kept.result(TIMEOUT_S).outcome is JobOutcome.DONE


def test_nothing_is_imported_from_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "resource.py").write_text(f"open({str(tmp_path / 'was-here')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    room = Room(nothing)
    try:
        assert reply(room, WHOSE).outcome is JobOutcome.DONE
    finally:
        room.close()
    assert not (tmp_path / "was-here").exists()


# ── turns ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


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
