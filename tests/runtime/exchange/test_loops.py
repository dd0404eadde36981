"""Loops that exchange reports: an idle loop takes part in every pass of the others, and sleeps between."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from rota.core.capacity import Capacity
from rota.core.config import EngineConfig
from rota.core.events import FinishReason, PrefillsReleased
from rota.core.ids import EngineId
from rota.core.policy_config import PolicyConfig
from rota.policy.prefill_delayer import Alone
from rota.runtime.process import _exchange
from rota.runtime.replicas.exchange import all_gather
from rota.runtime.replicas.exchange.all_gather import AllGather
from rota.runtime.replicas.exchange.place import Board, exchange_place, open_exchange
from rota.runtime.supervisor import SupervisedService
from tests.builders import capacity, submit
from tests.fakes import FakeDevice, continuation, endings, outputs
from tests.runtime.exchange.loops import loops_of
from tests.runtime.services import LONG, Listener
from tests.waiting import TIMEOUT_S, until

KINDS = ["all-gather", "board"]
DELAYING = PolicyConfig(enable_prefill_delayer=True, prefill_delayer_queue_min_ratio=0.5)
STEP_S = 0.005


def config_of(kind: str, policy: PolicyConfig = DELAYING) -> EngineConfig:
    return EngineConfig(policy=replace(policy, prefill_delayer_exchange=kind))


def device(rows: int = 6) -> FakeDevice:
    found: Capacity = capacity(rows=rows, blocks=LONG // 8, max_sequence_tokens=2 * LONG)
    return FakeDevice(found, step_s=STEP_S)


def test_an_idle_loop_takes_part_in_every_pass_of_another_and_then_both_sleep(monkeypatch):
    # A loop that waits for another in vain waits longer than this test does.
    monkeypatch.setattr(all_gather, "TIMEOUT_S", 2 * TIMEOUT_S)
    with loops_of(config_of("all-gather"), [device(), device()]) as (idle, busy):
        assert until(lambda: len(idle.reports) == len(busy.reports) == 2)
        before = idle.passes, busy.passes
        busy.send(submit("a", max_new_tokens=100))
        assert until(lambda: "a" in endings(busy.events))

        assert until(lambda: idle.passes - before[0] == busy.passes - before[1] > 100)
        at_rest = idle.passes, busy.passes
        time.sleep(1.2)  # longer than two beats: loops that wake for nothing would make passes
        assert (idle.passes, busy.passes) == at_rest
        told = [[event for event in rank.events if isinstance(event, PrefillsReleased)] for rank in (idle, busy)]
        assert [len(one) for one in told] == [0, 1], "a rank without prompts releases none"


def test_an_idle_loop_on_a_board_makes_no_pass_and_holds_nobody_back():
    with loops_of(config_of("board"), [device(), device()]) as (idle, busy):
        assert until(lambda: idle.passes > 0)
        before = idle.passes
        for name in "abc":
            busy.send(submit(name, max_new_tokens=20))
        assert until(lambda: len(endings(busy.events)) == 3)

        assert idle.passes == before
        reasons = {event.reason for event in busy.events if isinstance(event, PrefillsReleased)}
        assert "wait_timeout" not in reasons


@pytest.mark.parametrize("kind", KINDS)
def test_engines_in_processes_answer_as_without_a_delayer_and_outlive_the_death_of_one(kind):
    with exchange_place(config_of(kind), 2) as config, ExitStack() as stack:
        services, listeners = [], []
        for number in range(2):
            service = SupervisedService(device, replace(config, engine_id=EngineId(number)))
            listener = Listener()
            service.start(listener)
            stack.callback(service.stop)
            services.append(service)
            listeners.append(listener)
        for service in services:
            service.wait_until_ready()
        asked = [submit(f"r{number}", prompt=5 + number, max_new_tokens=20 + 7 * number) for number in range(16)]
        services[0].send(submit("lost", max_new_tokens=LONG))
        listeners[0].wait_for_tokens("lost")
        for number, message in enumerate(asked):
            services[number % 2].send(message)
        listeners[1].wait_for_tokens("r1")
        os.kill(services[0].engine_pid, signal.SIGKILL)

        for number in range(1, 16, 2):
            assert listeners[1].wait_for_ending(f"r{number}").reason is FinishReason.LENGTH
        assert listeners[0].wait_for_ending("lost").reason is FinishReason.FAILED
        again = [submit(f"again{number}", prompt=9, max_new_tokens=30) for number in range(4)]
        for number, message in enumerate(again):
            services[number % 2].send(message)
        for number in range(4):
            assert listeners[number % 2].wait_for_ending(f"again{number}").reason is FinishReason.LENGTH
        given = outputs(listeners[0].events + listeners[1].events)
        for request in (*asked[1::2], *again):
            expected = continuation(request.prompt, request.sampling.max_new_tokens)
            assert given[request.request_id] == expected


# ── places ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_place_is_private_and_gone_afterwards():
    with exchange_place(config_of("board"), 2) as config:
        folder = Path(config.exchange_at)
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


@pytest.mark.parametrize(("kind", "made"), [("auto", Board), ("board", Board), ("all-gather", AllGather)])
def test_independent_replicas_get_a_board_unless_asked_otherwise(kind, made):
    with exchange_place(config_of(kind), 3) as config:
        exchange, caller = open_exchange(replace(config, engine_id=EngineId(2)))
        assert isinstance(exchange, made)
        assert caller is (exchange if made is AllGather else None)
        exchange.close()


@pytest.mark.parametrize(("policy", "replicas"), [(DELAYING, 1), (PolicyConfig(), 2)])
def test_where_nothing_is_shared_there_is_no_place(policy, replicas):
    with exchange_place(EngineConfig(policy=policy), replicas) as config:
        assert config.exchange_at == ""
        assert isinstance(_exchange(config)[0], Alone)
