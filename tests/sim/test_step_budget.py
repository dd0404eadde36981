"""A crowd of prompts beside a stream on a slow device, in virtual time: with a limit the stream goes on."""

from __future__ import annotations

from itertools import pairwise

from rota.core.config import SchedulerConfig
from rota.core.events import Event, Produced
from rota.core.ids import RequestId
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from rota.sim.cost import LinearCost
from rota.sim.world import VirtualWorld
from tests.builders import capacity, submit

FREE = dict.fromkeys(("prefill_s", "lora_s", "sequence_s", "context_token_s", "adapter_s", "load_s", "fetch_s"), 0.0)
# SmolLM2-135M on two cores: 20 ms for a token, and 3.4 ms for each token of a prompt.
CPU = LinearCost(name="two cores", base_s=0.02, prompt_token_s=0.0034, **FREE)
FOUND = capacity(blocks=400, rows=16, max_sequence_tokens=1024)


def served(max_step_ms: float | str) -> list[Event]:
    stream = submit("stream", prompt=10, max_new_tokens=500)
    crowd = [(2.0, submit(f"crowd{n}", prompt=300, max_new_tokens=1, arrived_at=2.0)) for n in range(8)]
    config, events = SchedulerConfig(max_step_ms=max_step_ms), list[Event]()
    run(Scheduler(config, FOUND), VirtualWorld([(0.0, stream), *crowd], CPU), events.extend, config.overlap_depth)
    return events


def longest_gap_s(events: list[Event]) -> float:
    tokens = [one.at for one in events if isinstance(one, Produced) and RequestId("stream") in one.request_ids]
    return max(later - earlier for earlier, later in pairwise(tokens))


def last_of_the_crowd_s(events: list[Event]) -> float:
    return max(one.at for one in events if isinstance(one, Produced) and set(one.request_ids) - {"stream"})


def test_a_stream_goes_on_beside_a_crowd_and_the_crowd_ends_hardly_later():
    plain, limited = served("auto"), served(100.0)

    assert longest_gap_s(plain) > 6.0
    assert longest_gap_s(limited) <= 0.1
    assert last_of_the_crowd_s(limited) <= 2.0 + 1.3 * (last_of_the_crowd_s(plain) - 2.0)


def test_the_same_run_gives_the_same_events():
    assert served(100.0) == served(100.0)
