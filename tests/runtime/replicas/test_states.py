from __future__ import annotations

import pytest

from rota.runtime.replicas.roster import joint_state
from rota.runtime.service import ServicePhase, ServiceState
from tests.builders import capacity

SMALL, LARGE = capacity(blocks=32), capacity(blocks=64)
FIRST = ServiceState(phase=ServicePhase.STARTING)
READY = ServiceState(phase=ServicePhase.READY, capacity=LARGE, engine_pid=7, has_served=True)
AGAIN = ServiceState(phase=ServicePhase.STARTING, has_served=True)
BAD = ServiceState(phase=ServicePhase.DOWN, reason="There is no model.")
LOST = ServiceState(phase=ServicePhase.DOWN, reason="It died 5 times.", has_served=True)
WAITS = ServiceState(phase=ServicePhase.STARTING, reason="No GPU is free.", may_last=True)
STOPPED = ServiceState(phase=ServicePhase.DOWN, reason="The engine was stopped.", has_served=True)


@pytest.mark.parametrize(
    ("states", "phase", "reason"),
    [
        ([FIRST, FIRST], ServicePhase.STARTING, ""),
        ([READY, FIRST], ServicePhase.STARTING, ""),  # a server starts with all its replicas
        ([READY, READY], ServicePhase.READY, ""),
        ([READY, BAD], ServicePhase.DOWN, "Replica 1 is down: There is no model."),
        ([BAD, BAD], ServicePhase.DOWN, "There is no model."),
        ([READY, AGAIN], ServicePhase.READY, ""),  # and serves on while one of them starts again
        ([AGAIN, AGAIN], ServicePhase.STARTING, ""),
        ([LOST, READY], ServicePhase.READY, "Replica 0 is down: It died 5 times."),
        ([LOST, AGAIN], ServicePhase.STARTING, "Replica 0 is down: It died 5 times."),
        ([LOST, LOST], ServicePhase.DOWN, "It died 5 times."),
        (
            [LOST, STOPPED],
            ServicePhase.DOWN,
            "Replica 0 is down: It died 5 times. Replica 1 is down: The engine was stopped.",
        ),
    ],
)
def test_the_state_of_all_replicas_together(states, phase, reason):
    state = joint_state(states)

    assert (state.phase, state.reason) == (phase, reason)
    assert (state.capacity is not None) is (phase is ServicePhase.READY)
    assert [engine.engine_id for engine in state.engines] == [0, 1]
    assert [engine.phase for engine in state.engines] == [one.phase for one in states]


@pytest.mark.parametrize(
    ("states", "phase", "reason"),
    [
        ([READY, FIRST], ServicePhase.READY, ""),  # the second joined later
        ([READY, WAITS], ServicePhase.READY, "Replica 1 waits: No GPU is free."),
        ([READY, BAD], ServicePhase.READY, "Replica 1 is down: There is no model."),
        ([FIRST, READY], ServicePhase.STARTING, ""),
        ([FIRST, BAD], ServicePhase.STARTING, "Replica 1 is down: There is no model."),
        ([BAD, READY], ServicePhase.DOWN, "Replica 0 is down: There is no model."),
        ([LOST, FIRST], ServicePhase.STARTING, "Replica 0 is down: It died 5 times."),
        ([LOST, BAD], ServicePhase.DOWN, "Replica 0 is down: It died 5 times. Replica 1 is down: There is no model."),
        ([LOST, READY], ServicePhase.READY, "Replica 0 is down: It died 5 times."),
    ],
)
def test_a_replica_that_joined_later_neither_holds_up_a_start_nor_ends_a_service(states, phase, reason):
    state = joint_state(states, first=1)

    assert (state.phase, state.reason) == (phase, reason)


@pytest.mark.parametrize(
    ("states", "phase", "reason", "may_last"),
    [
        ([WAITS, WAITS], ServicePhase.STARTING, "No GPU is free.", True),
        ([WAITS, FIRST], ServicePhase.STARTING, "Replica 0 waits: No GPU is free.", False),
        ([WAITS, READY], ServicePhase.READY, "Replica 0 waits: No GPU is free.", False),  # it serves with what there is
        (
            [WAITS, BAD],
            ServicePhase.DOWN,
            "Replica 0 waits: No GPU is free. Replica 1 is down: There is no model.",
            False,
        ),
        (
            [WAITS, LOST],
            ServicePhase.STARTING,
            "Replica 0 waits: No GPU is free. Replica 1 is down: It died 5 times.",
            True,
        ),
        ([WAITS, AGAIN], ServicePhase.STARTING, "Replica 0 waits: No GPU is free.", False),
    ],
)
def test_replicas_without_a_place_are_not_waited_for_while_any_other_serves_or_starts(states, phase, reason, may_last):
    state = joint_state(states)

    assert (state.phase, state.reason, state.may_last) == (phase, reason, may_last)


def test_a_service_that_has_served_stays_ready_when_a_replica_gets_its_place_at_last():
    assert joint_state([READY, WAITS]).has_served
    assert joint_state([READY, FIRST], has_served=True).phase is ServicePhase.READY
    assert joint_state([READY, BAD], has_served=True).phase is ServicePhase.READY


def test_what_fits_into_the_smallest_replica_that_serves_is_what_the_service_can_hold():
    small = ServiceState(phase=ServicePhase.READY, capacity=SMALL, has_served=True)

    assert joint_state([READY, small]).capacity == SMALL
    assert joint_state([READY, LOST]).capacity == LARGE


def test_a_service_that_may_not_be_used_yet_has_no_engine_that_is_up():
    early = joint_state([READY, READY]).as_starting()

    assert (early.phase, early.capacity) == (ServicePhase.STARTING, None)
    assert [(engine.phase, engine.capacity, engine.engine_pid) for engine in early.engines] == [
        (ServicePhase.STARTING, None, 7)
    ] * 2
