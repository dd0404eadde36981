"""The same messages give the same events, whatever Python's hashes are: every rank and every rerun decides alike."""

from __future__ import annotations

import os
import random
import sys
from hashlib import sha256
from pathlib import Path

from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.events import Event, Preempted
from rota.core.ids import AdapterId
from rota.core.messages import Message, RemoveAdapter
from rota.core.policy_config import PolicyConfig
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from rota.sim import VirtualWorld
from tests.builders import abort, add_adapter, capacity, submit
from tests.costs import constant_cost
from tests.processes import run_program

ROOT = Path(__file__).parents[2]
POLICIES = {
    "rotate": PolicyConfig(lora_policy="rotate", enable_prefill_delayer=True, prefill_delayer_queue_min_ratio=0.3),
    "drain": PolicyConfig(lora_policy="drain", lora_drain_wait_threshold=0.5),
    "wait": PolicyConfig(lora_policy="wait", enable_prefill_delayer=True),
}


def traffic() -> list[tuple[float, Message]]:
    """Many ties on purpose: moments are few, and adapters many."""
    dice = random.Random(7)
    messages: list[tuple[float, Message]] = [(0.0, add_adapter(number)) for number in range(1, 13)]
    for number in range(150):
        at, adapter = dice.randrange(20) / 4, AdapterId(dice.randrange(13))
        length, output = dice.choice([4, 40]), dice.choice([3, 70])
        messages.append(
            (at, submit(f"r{number}", adapter=adapter, prompt=length, max_new_tokens=output, arrived_at=at))
        )
        if dice.random() < 0.2:
            messages.append((at + 0.5, abort(f"r{number}", at + 0.5)))
    return messages + [
        (3.0, RemoveAdapter(adapter_id=AdapterId(number), at=3.0, is_forced=number % 2 == 0)) for number in (3, 4)
    ]


def events(policy: PolicyConfig) -> list[Event]:
    found = capacity(blocks=36, rows=16, slots=3)
    lora = LoraConfig(max_loaded_loras=6)
    scheduler = Scheduler(SchedulerConfig(chunked_prefill_size=64), found, policy, lora)
    happened: list[Event] = []
    run(scheduler, VirtualWorld(traffic(), constant_cost(seconds=0.02, load_s=0.01, fetch_s=0.05)), happened.extend)
    return happened


def digest() -> str:
    return sha256(repr([events(policy) for policy in POLICIES.values()]).encode()).hexdigest()


def test_events_do_not_depend_on_how_python_hashes():
    program = "from tests.scheduler.test_determinism import digest; print(digest())"
    digests = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        outcome = run_program([sys.executable, "-c", program], cwd=ROOT, env=environment)
        digests.add(outcome.stdout.strip())

    assert digests == {digest()}


def test_the_traffic_above_brings_every_ledger_into_play():
    happened = {name: events(policy) for name, policy in POLICIES.items()}
    assert len({repr(one) for one in happened.values()}) == len(POLICIES)
    assert all(any(isinstance(event, Preempted) for event in one) for one in happened.values())
