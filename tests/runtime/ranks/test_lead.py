"""The leader of ranks: each is a process of its own behind an ordinary supervisor, and one message tells of all."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.core.errors import ConfigError, EngineDiedError, FaultCode
from rota.core.events import AdapterAdded, AdapterRefused, EngineRestarted, FinishReason
from rota.core.ids import AdapterId, Slot
from rota.core.messages import AdapterFailed, AdapterFetched, AdapterReady, Message
from rota.core.plan import Load, StepPlan
from rota.runtime.ranks.lead import Agreement
from rota.runtime.timeouts import EngineTimeouts
from tests.builders import add_adapter, submit
from tests.fakes import continuation, outputs
from tests.processes import is_alive
from tests.runtime.ranks.rank_devices import (
    Refusal,
    Unreadable,
    gapped_leader,
    hasty_leader,
    late_follower,
    listening_at,
    picky_follower,
    pid_of,
    service_tasks,
    slow_rank,
    supervised_ranks,
)
from tests.runtime.services import LONG, Listener
from tests.waiting import until

# ── ranks of fake devices ─────────────────────────────────────────────────────────────────────────────────────────────


def restarts(listener: Listener) -> list[str]:
    return [event.reason for event in listener.events if isinstance(event, EngineRestarted)]


@pytest.mark.parametrize("victim", [1, 0], ids=["follower", "leader"])
def test_a_rank_that_is_killed_under_load_ends_its_replicas_requests_and_all_ranks_start_again(tmp_path, victim):
    with supervised_ranks(partial(slow_rank, tmp_path), 3) as (service, listener):
        service.send(add_adapter(1))
        listener.wait_for_adapter(1, AdapterAdded)
        for name in "ab":
            service.send(submit(name, max_new_tokens=LONG, adapter=AdapterId(1)))
            listener.wait_for_tokens(name, 2)
        first = [pid_of(tmp_path, rank) for rank in range(3)]
        os.kill(first[victim], signal.SIGKILL)

        for name in "ab":
            fault = listener.wait_for_ending(name).fault
            assert fault.code is FaultCode.ENGINE_DIED
            assert f"process{f' of rank {victim}' if victim else ''} was killed by SIGKILL" in fault.message
        again = submit("again", max_new_tokens=5, adapter=AdapterId(1))
        service.send(again)
        assert listener.wait_for_ending("again").reason is FinishReason.LENGTH
        assert outputs(listener.events)["again"] == continuation(again.prompt, 5)
        assert until(lambda: not any(map(is_alive, first)))
        second = [pid_of(tmp_path, rank) for rank in range(3)]
        assert all(map(is_alive, second))
        assert len(restarts(listener)) == 1
    assert until(lambda: not any(map(is_alive, second))), "a rank has outlived its service"


def test_a_rank_that_fails_for_lack_of_another_is_not_taken_for_the_cause(tmp_path):
    with supervised_ranks(partial(service_tasks, tmp_path), 3) as (service, listener):
        service.send(submit("lost", max_new_tokens=LONG))

        message = listener.wait_for_ending("lost").fault.message
        assert "The process of rank 2 was killed by SIGKILL." in message
        assert "closed by peer" not in message


def test_ranks_leave_no_file_and_are_reached_from_this_machine_alone(tmp_path, monkeypatch):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    with supervised_ranks(partial(slow_rank, tmp_path)) as (service, _):
        service.wait_until_ready()

        assert listening_at(pid_of(tmp_path, 0)) == {"0100007F"}
        assert listening_at(pid_of(tmp_path, 1)) == set()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("is_idle", [False, True], ids=["busy", "idle"])
def test_a_follower_that_hangs_is_named_and_all_ranks_start_again(tmp_path, is_idle):
    # Time is what is tested: the supervisor itself would wait much longer.
    timeouts = EngineTimeouts(silence_s=2.0)
    with supervised_ranks(partial(slow_rank, tmp_path), rank_timeouts=timeouts) as (service, listener):
        service.wait_until_ready()
        if not is_idle:
            service.send(submit("open", max_new_tokens=LONG))
            listener.wait_for_tokens("open")
        os.kill(pid_of(tmp_path, 1), signal.SIGSTOP)

        assert until(lambda: len(restarts(listener)) == 1)
        assert "No word from rank 1. The engine hung: it said nothing for 2 seconds." in restarts(listener)[0]
        service.send(submit("after"))
        assert listener.wait_for_ending("after").reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_slow_follower_has_not_read_or_copied_is_waited_for(tmp_path, depth):
    with supervised_ranks(partial(late_follower, tmp_path), depth=depth) as (service, listener):
        service.send(add_adapter(1))
        base = submit("base", max_new_tokens=5)
        service.send(base)
        assert listener.wait_for_ending("base").reason is FinishReason.LENGTH
        assert not any(isinstance(event, AdapterAdded) for event in listener.events)

        (tmp_path / "open").touch()
        listener.wait_for_adapter(1, AdapterAdded)
        (tmp_path / "open").unlink()
        asked = submit("asked", adapter=AdapterId(1))
        service.send(asked)
        service.send(submit("meanwhile", max_new_tokens=5))
        listener.wait_for_ending("meanwhile")
        assert "asked" not in outputs(listener.events)

        (tmp_path / "open").touch()
        assert listener.wait_for_ending("asked").reason is FinishReason.LENGTH
        assert outputs(listener.events)["asked"] == continuation(asked.prompt, 4)
        assert restarts(listener) == []


def test_the_fake_follower_notices_a_leader_that_does_not_wait(tmp_path):
    """The test above would fail, if rank 0 alone decided when an adapter is there."""
    with supervised_ranks(partial(hasty_leader, tmp_path)) as (service, listener):
        service.send(add_adapter(1))
        listener.wait_for_adapter(1, AdapterAdded)
        service.send(submit("asked", max_new_tokens=LONG, adapter=AdapterId(1)))

        assert "is used before it is complete" in listener.wait_for_ending("asked").fault.message


def test_an_adapter_that_one_rank_cannot_read_is_refused_and_dropped_by_the_others(tmp_path):
    with supervised_ranks(partial(picky_follower, tmp_path)) as (service, listener):
        service.send(add_adapter(7, name="picky"))
        refusal = listener.wait_for_adapter(7, AdapterRefused)
        assert refusal.reason == "Rank 1: broken is broken."

        service.send(add_adapter(8))
        listener.wait_for_adapter(8, AdapterAdded)
        assert (tmp_path / "drops").read_text() == "7\n"
        assert restarts(listener) == []


def test_a_follower_that_missed_a_plan_ends_the_replica(tmp_path):
    with supervised_ranks(partial(gapped_leader, tmp_path)) as (service, listener):
        service.send(submit("lost", max_new_tokens=LONG))

        fault = listener.wait_for_ending("lost").fault
        assert "Rank 1: Plan 4 is missing: plan 5 came instead." in fault.message
        service.send(submit("after", max_new_tokens=10))
        assert listener.wait_for_ending("after").reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("rank", "error", "sentence"),
    [
        (0, ConfigError, "7 does not divide"),
        (1, ZeroDivisionError, "Rank 1: The engine failed with ZeroDivisionError: 7 does not divide"),
    ],
)
def test_why_a_rank_cannot_be_built_reaches_the_user(rank, error, sentence):
    with (
        supervised_ranks(Refusal(rank, error, "7 does not divide")) as (service, _),
        pytest.raises(EngineDiedError, match=sentence),
    ):
        service.wait_until_ready()


def test_a_rank_whose_process_ends_before_it_arrives_is_named():
    with (
        supervised_ranks(Unreadable()) as (service, _),
        pytest.raises(EngineDiedError, match="The process of rank 1 ended with exit code 1"),
    ):
        service.wait_until_ready()


# ── one message of all ranks ──────────────────────────────────────────────────────────────────────────────────────────

ONE, TWO = AdapterId(1), AdapterId(2)


def agreement_of(ranks: int) -> tuple[Agreement, list[Message]]:
    agreement, posted = Agreement(range(ranks)), []
    agreement.listen(posted.append)
    return agreement, posted


def fetch(*numbers: int) -> StepPlan:
    return StepPlan(step_id=0, fetches=tuple(add_adapter(number).adapter for number in numbers))


def load(*numbers: int) -> StepPlan:
    return StepPlan(step_id=0, loads=tuple(Load(adapter_id=AdapterId(number), slot=Slot(0)) for number in numbers))


def test_an_adapter_is_fetched_when_every_rank_has_said_so():
    agreement, posted = agreement_of(3)
    agreement.order(fetch(1, 2))

    agreement.note(2, AdapterFetched(adapter_id=ONE, at=3.0))
    agreement.note(0, AdapterFetched(adapter_id=ONE, at=4.0))
    agreement.note(0, AdapterFetched(adapter_id=TWO, at=5.0))
    assert posted == []
    agreement.note(1, AdapterFetched(adapter_id=ONE, at=6.0))

    assert posted == [AdapterFetched(adapter_id=ONE, at=6.0)]


def test_an_adapter_takes_as_many_pages_as_the_rank_that_needs_most():
    agreement, posted = agreement_of(2)
    agreement.order(fetch(1))
    agreement.note(1, AdapterFetched(adapter_id=ONE, at=4.0, pages=1, seals=("second",)))
    agreement.note(0, AdapterFetched(adapter_id=ONE, at=3.0, pages=2, seals=("first",)))

    assert posted == [AdapterFetched(adapter_id=ONE, at=4.0, pages=2, seals=("first", "second"))]


def test_a_copy_is_complete_with_the_last_rank_and_took_as_long_as_the_longest():
    agreement, posted = agreement_of(3)
    agreement.order(load(1))

    agreement.note(1, AdapterReady(ONE, 1.0, copy_s=0.4))
    agreement.note(0, AdapterReady(ONE, 2.0, copy_s=0.1))
    assert posted == []
    agreement.note(2, AdapterReady(ONE, 3.0, copy_s=0.2))

    assert posted == [AdapterReady(ONE, 3.0, copy_s=0.4)]


def test_a_rank_that_cannot_read_fails_the_adapter_for_all_and_the_next_plan_drops_what_others_have_read():
    agreement, posted = agreement_of(2)
    agreement.order(fetch(1))

    agreement.note(1, AdapterFailed(adapter_id=ONE, at=1.0, reason="The disk is broken."))
    assert posted == []
    agreement.note(0, AdapterFetched(adapter_id=ONE, at=2.0))

    assert posted == [AdapterFailed(adapter_id=ONE, at=1.0, reason="Rank 1: The disk is broken.")]
    again = agreement.order(fetch(1))
    assert (again.drops, again.fetches) == ((ONE,), fetch(1).fetches)
    assert agreement.order(fetch(2)).drops == ()


def test_an_adapter_that_no_rank_can_read_has_rank_0s_reason_and_nothing_to_drop():
    agreement, posted = agreement_of(2)
    agreement.order(fetch(1))
    for rank in (1, 0):
        agreement.note(rank, AdapterFailed(adapter_id=ONE, at=1.0, reason="There is no such folder."))

    assert posted == [AdapterFailed(adapter_id=ONE, at=1.0, reason="There is no such folder.")]
    assert agreement.order(load(2)).drops == ()


def test_a_copy_that_failed_is_told_at_once_and_only_once():
    agreement, posted = agreement_of(3)
    agreement.order(load(1))

    agreement.note(2, AdapterFailed(adapter_id=ONE, at=1.0, reason="No memory."))
    assert posted == [AdapterFailed(adapter_id=ONE, at=1.0, reason="Rank 2: No memory.")]
    agreement.note(0, AdapterFailed(adapter_id=ONE, at=2.0, reason="No memory."))
    agreement.note(1, AdapterReady(ONE, 3.0))

    assert len(posted) == 1
    agreement.order(load(1))
    for rank in range(3):
        agreement.note(rank, AdapterReady(ONE, 4.0))
    assert posted[1:] == [AdapterReady(ONE, 4.0)]


def test_a_rank_that_is_ahead_counts_for_the_order_after():
    agreement, posted = agreement_of(2)
    for _ in range(2):
        agreement.order(load(1))

    agreement.note(0, AdapterReady(ONE, 1.0))
    agreement.note(0, AdapterReady(ONE, 2.0))
    agreement.note(1, AdapterReady(ONE, 3.0))
    assert len(posted) == 1
    agreement.note(1, AdapterReady(ONE, 4.0))
    assert len(posted) == 2


def test_what_nobody_ordered_is_not_told():
    agreement, posted = agreement_of(1)
    agreement.note(0, AdapterReady(ONE, 1.0))
    assert posted == []


@given(st.integers(1, 4), st.lists(st.booleans(), min_size=1, max_size=6), st.data())
def test_in_any_order_of_words_each_read_ends_in_one_message_of_all_ranks(ranks, successes, data):
    """One adapter is read again and again; each rank reports in order, and ranks are interleaved at will."""
    agreement, posted = agreement_of(ranks)
    for _ in successes:
        agreement.order(fetch(1))
    outcomes = {rank: data.draw(st.permutations(successes)) for rank in range(ranks)}
    said: dict[int, int] = defaultdict(int)
    turns = data.draw(st.permutations([rank for rank in range(ranks) for _ in successes]))
    for rank in turns:
        is_good = outcomes[rank][said[rank]]
        said[rank] += 1
        agreement.note(
            rank,
            AdapterFetched(adapter_id=ONE, at=1.0) if is_good else AdapterFailed(adapter_id=ONE, at=1.0, reason="bad"),
        )
        assert len(posted) == min(said[rank] for rank in range(ranks))

    expected = [all(outcomes[rank][at] for rank in range(ranks)) for at in range(len(successes))]
    assert [isinstance(message, AdapterFetched) for message in posted] == expected


def test_a_device_that_says_anything_else_is_a_bug():
    agreement, _ = agreement_of(1)
    with pytest.raises(AssertionError):
        agreement.note(0, object())  # type: ignore[arg-type]
