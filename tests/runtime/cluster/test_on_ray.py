"""Three replicas on a real Ray cluster of three nodes, all on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from rota.core.events import FinishReason
from tests.builders import submit
from tests.fakes import continuation
from tests.runtime.cluster.clusters import RayNodes, ray_nodes
from tests.runtime.cluster.services import all_serve, free_again, served
from tests.waiting import until
from tests.worlds import outputs

TOKENS = 100


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(3) as found:
        yield found


def test_replicas_on_ray_serve_and_one_that_is_killed_is_placed_again(nodes):
    with served(nodes) as (service, listener):
        pids = [one.engine_pid for one in service.state.engines]
        assert len(set(pids)) == 3
        names = ask(service, listener, 9)

        os.kill(pids[0], signal.SIGKILL)

        endings = [listener.wait_for_ending(name) for name in names]
        lost = [one for one in endings if one.reason is FinishReason.FAILED]
        assert len(lost) == 3
        assert {one.fault.message.split(".")[0] for one in lost} == {"The engine process was killed by SIGKILL"}
        for name, ending in zip(names, endings, strict=True):
            if ending.reason is FinishReason.LENGTH:
                assert outputs(listener.events)[name] == continuation(submit(name).request.prompt, TOKENS)
        assert until(lambda: all_serve(service))
        (name,) = ask(service, listener, 1, "later")
        assert listener.wait_for_ending(name).reason is FinishReason.LENGTH
    assert until(lambda: nodes.engines() == [])
    assert free_again(nodes)


def ask(service, listener, number: int, name: str = "r") -> list[str]:
    """Requests of which each has begun."""
    names = [f"{name}{index}" for index in range(number)]
    for one in names:
        service.send(submit(one, max_new_tokens=TOKENS))
    for one in names:
        listener.wait_for_tokens(one)
    return names
