"""A follower replays the leader's plans on its own device, through all restarts, until the leader says `Stop`."""

from __future__ import annotations

import math
import os
import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from rota.core.config import EngineConfig
from rota.core.errors import ConfigError, EngineDiedError, EngineLostError
from rota.core.messages import Message
from rota.policy.step_times import StepTimes
from rota.runtime.children import freeze_heap
from rota.runtime.heartbeat import BEAT_S, Heartbeat
from rota.runtime.ranks.meeting import (
    CODEC,
    MEET_S,
    Hello,
    MakeDevice,
    MeetingRefused,
    Numbered,
    Socket,
    Welcome,
    facts,
    open_line,
)
from rota.runtime.ranks.processes import FollowerJob, LaunchedProcess, start_follower
from rota.runtime.service import explain
from rota.runtime.timeouts import LINGER_S
from rota.runtime.wire import Failed, Outbox, Ready, Stop
from rota.runtime.world import Device
from rota.start import START

# ── follower ────────────────────────────────────────────────────────────────────────────────────────────────────────

# How a follower's process ends: as told, because of an error, because of what was asked, because its leader is gone.
STOPPED, FAILED, REFUSED, LEADERLESS = 0, 1, 2, 75  # EX_TEMPFAIL in <sysexits.h>
# How long a follower may take to come to the leader's last word: its machine may be busy, and its device may wait for a
# leader that is gone.
_LAST_WORD_S = 5.0


def main() -> None:
    """The job comes from the leader, or from the process that torchrun started, on stdin."""
    job: FollowerJob = pickle.load(sys.stdin.buffer)
    code = follow(job)
    # A normal exit would wait for every thread that still reads an adapter.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def follow(job: FollowerJob, end: Callable[[int], None] = os._exit) -> int:
    """Meet, build and replay; returns how the process shall end. `end` is called once the leader is gone."""
    context: zmq.Context[Socket] = zmq.Context()
    plans = open_line(context, zmq.DEALER)
    is_lost, is_over = threading.Event(), threading.Event()
    watch_leader(plans, is_lost, is_over, end)
    plans.connect(job.address)
    try:
        code = _serve(job, arrive(plans, job), context, plans, is_lost)
    except (ConfigError, EngineDiedError) as error:
        print(f"Rank {job.config.rank}: {error}", file=sys.stderr)
        code = REFUSED
    is_over.set()
    plans.close()
    context.term()
    return code


def arrive(plans: Socket, job: FollowerJob) -> Welcome:
    """Tell the leader what this rank brings, and wait for all others."""
    config = job.config
    hello = Hello(rank=config.rank, size=config.model.tensor_parallel_size, secret=job.secret, facts=facts(config))
    plans.send(CODEC.encode([hello]))
    # The leader itself waits `meet_s` for the last rank to arrive.
    if not plans.poll(math.ceil(2000.0 * job.meet_s)):
        raise EngineDiedError(f"Rank 0 did not answer at {job.address} within {2 * job.meet_s:g} seconds.")
    (answer,) = CODEC.decode(plans.recv())
    if isinstance(answer, MeetingRefused):
        raise ConfigError(answer.reason)
    assert isinstance(answer, Welcome)
    return answer


def watch_leader(
    plans: Socket,
    is_lost: threading.Event,
    is_over: threading.Event,
    end: Callable[[int], None],
    last_word_s: float = _LAST_WORD_S,
) -> None:
    """Say when the connection to the leader is lost, and end this process if its device then waits for the leader."""
    monitor = plans.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def watch() -> None:
        with monitor:
            try:
                recv_monitor_message(monitor)
            except zmq.ContextTerminated:
                return
        is_lost.set()
        # The leader's last word came before: it may still be read.
        if not is_over.wait(last_word_s):
            end(LEADERLESS)

    threading.Thread(target=watch, name="rota-leader-watch", daemon=True).start()


def _serve(
    job: FollowerJob, welcome: Welcome, context: zmq.Context[Socket], plans: Socket, is_lost: threading.Event
) -> int:
    reports = open_line(context, zmq.DEALER, LINGER_S)
    reports.routing_id = welcome.name
    reports.connect(welcome.reports)
    outbox = Outbox(reports)
    START.tell_progress, START.autotuned = outbox.tell_progress, job.autotuned
    START.tell_progress("Building")
    try:
        device = job.make_device(replace(job.config, meeting=welcome.meeting))

        def report(message: Message) -> None:
            outbox.send([message])

        device.listen(report)
        freeze_heap()
        outbox.send([Ready(device.capacity)])
        heartbeat = Heartbeat(outbox.tell_alive, StepTimes.of(device.capacity))
        replay(device, plans, heartbeat, job.config.scheduler.overlap_depth, is_lost.is_set)
        return STOPPED
    except Exception as error:  # the border of a process: the leader must hear why
        outbox.send([Failed(explain(error))])
        return FAILED
    finally:
        reports.close()


def replay(
    device: Device[Any],
    plans: Socket,
    heartbeat: Heartbeat,
    depth: int = 2,
    is_lost: Callable[[], bool] = lambda: False,
) -> None:
    """Carry out every plan in the order of the leader, until `Stop`; raises EngineDiedError if the leader is lost.

    A step is collected as late as at the leader: when `depth` steps are in flight behind it.
    """
    in_flight: deque[Any] = deque()
    number = 0

    def collect() -> None:
        heartbeat.step_ended(device.collect(in_flight.popleft()).step_s)

    while True:
        heartbeat.beat()
        was_lost = is_lost()  # what the leader sent before that is there by now
        if not plans.poll(0 if was_lost else math.ceil(BEAT_S * 1000.0)):
            if was_lost:
                raise EngineDiedError("Rank 0 is gone.")
            while in_flight:  # the leader is idle, so it has collected all
                collect()
            continue
        (record,) = CODEC.decode(plans.recv())
        if isinstance(record, Stop):
            return
        assert isinstance(record, Numbered), "a leader sends plans"
        number += 1
        if record.number != number:
            raise EngineDiedError(f"Plan {number} is missing: plan {record.number} came instead.")
        heartbeat.step_begins(record.plan.prompt_tokens)
        in_flight.append(device.submit(record.plan))
        if len(in_flight) > depth:
            collect()


# ── attend ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# A rank that torchrun has started follows rank 0 through all restarts, until rank 0 ends.

# Rank 0 starts its engine again within seconds of its end, but may wait for the silence of a rank before that.
AGAIN_S = 60.0


def attend(make_device: MakeDevice, config: EngineConfig, place: LaunchedProcess, again_s: float = AGAIN_S) -> None:
    """Returns when rank 0 has stopped; raises when rank 0 does not come back or wants nothing of this rank.

    Each life is a process of its own: a device that has lost its group cannot join another.
    """
    config = replace(config, rank=place.rank, device_number=place.device_number, local_ranks=place.local_ranks)
    job = FollowerJob(make_device=make_device, config=config, address=place.address, meet_s=MEET_S)
    while (code := start_follower(job).wait()) != STOPPED:
        if code == REFUSED:
            raise EngineLostError(f"Rank {place.rank} does not follow rank 0 any more.")
        job = replace(job, meet_s=again_s)
