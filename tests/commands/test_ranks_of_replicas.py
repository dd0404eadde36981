"""Replicas of several ranks each: what happens to a rank happens to its own replica alone."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial

import pytest

from rota.commands.engines import engine_service
from rota.core.config import ServerConfig
from rota.core.errors import FaultCode
from rota.core.events import EngineRestarted, FinishReason, Produced
from rota.core.ids import RequestId
from tests.builders import abort, submit
from tests.processes import is_alive
from tests.runtime.ranks.rank_devices import config_of, pid_of, slow_rank
from tests.runtime.services import LONG, Listener
from tests.waiting import until


def replica_of(listener: Listener, name: str) -> int:
    return next(e.engine_id for e in listener.events if isinstance(e, Produced) and RequestId(name) in e.request_ids)


@pytest.mark.parametrize(
    "rank",
    [pytest.param(0, id="leader", marks=pytest.mark.long("a follower shows the same")), pytest.param(1, id="follower")],
)
def test_a_rank_that_is_killed_ends_the_requests_of_its_own_replica_alone(tmp_path, rank):
    config = config_of(2)
    config = replace(config, model=replace(config.model, data_parallel_size=2))
    service, listener = engine_service(config, ServerConfig(), partial(slow_rank, tmp_path)), Listener()
    service.start(listener)
    try:
        service.wait_until_ready()
        names = [f"r{number}" for number in range(4)]
        for name in names:
            service.send(submit(name, max_new_tokens=LONG))
            listener.wait_for_tokens(name)
        hit = {name for name in names if replica_of(listener, name) == 1}
        assert 0 < len(hit) < len(names)
        ranks = [pid_of(tmp_path, each, replica) for replica in range(2) for each in range(2)]
        os.kill(pid_of(tmp_path, rank, 1), signal.SIGKILL)

        assert {listener.wait_for_ending(name).fault.code for name in hit} == {FaultCode.ENGINE_DIED}
        for name in {*names} - hit:
            service.send(abort(name))
            assert listener.wait_for_ending(name).reason is FinishReason.ABORT
        assert [event.engine_id for event in listener.events if isinstance(event, EngineRestarted)] == [1]
        assert [is_alive(pid) for pid in ranks] == [True, True, False, False]
        assert until(lambda: is_alive(pid_of(tmp_path, rank, 1)))
    finally:
        service.stop()
    assert until(lambda: not any(is_alive(pid_of(tmp_path, each, replica)) for replica in (0, 1) for each in (0, 1)))
