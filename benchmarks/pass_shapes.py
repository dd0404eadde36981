"""Shapes of load under which a pass of the scheduler could take long; each is built at any size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pass_stage import Ask, Stage

from rota.core.policy_config import PolicyConfig

Shape = Callable[[float], Stage]

WAIT = PolicyConfig(lora_policy="wait")
DRAIN = PolicyConfig(lora_policy="drain", lora_drain_wait_threshold=0.1)
ROTATE = PolicyConfig(lora_policy="rotate")
BY_NAME = {"wait": WAIT, "drain": DRAIN, "rotate": ROTATE}
SLOTS = 32


def of(size: float, many: int) -> int:
    return max(1, round(size * many))


def pinned_and_urgent(size: float, *, adapters: int, policy: PolicyConfig = WAIT) -> Stage:
    """256 urgent requests run beside a pinned adapter without any, and others wait for few adapters or for one each."""
    stage = Stage.of(policy, slots=SLOTS, rows=512)
    adapters = of(size, adapters) if adapters > 1 else 1
    stage.add(SLOTS + adapters, pinned=1)
    for number in range(256):
        stage.ask(Ask(2 + number % (SLOTS - 1), output=400 + number, priority=1))
    stage.ask(Ask())
    warm_up(stage)
    for number in range(of(size, 2000)):
        stage.ask(Ask(SLOTS + 1 + number % adapters, priority=1))
    return stage


def long_prompts(size: float, *, blocks: int, adapters: int, policy: PolicyConfig = ROTATE) -> Stage:
    """Prompts of 32,000 tokens wait, with prefix caching and with KV for few of them."""
    stage = Stage.of(policy, blocks=blocks, is_caching=True, slots=2)
    stage.add(max(2, adapters))
    for _ in range(4):
        stage.ask(Ask(output=2000))
    for number in range(of(size, 120)):
        stage.ask(Ask(1 + number % adapters if adapters else 0, prompt=32_000, output=16))
    return stage


def on_disk(size: float, *, policy: PolicyConfig, rows: int = 256, blocks: int = 65_536) -> Stage:
    """A request waits for each of 1,000 adapters, of which 128 are in host memory; a read takes five steps."""
    stage = Stage.of(policy, slots=8, on_host=128, read_steps=5, rows=rows, blocks=blocks)
    adapters = of(size, 1000)
    stage.add(adapters)
    for number in range(adapters):
        stage.ask(Ask(1 + number, output=32))
    return stage


def crowd(size: float, *, policy: PolicyConfig, adapters: int = 5000, rows: int = 256, blocks: int = 65_536) -> Stage:
    """A request waits for each of 5,000 adapters, all in host memory."""
    stage = Stage.of(policy, slots=SLOTS, rows=rows, blocks=blocks)
    adapters = of(size, adapters)
    stage.add(adapters)
    for number in range(adapters):
        stage.ask(Ask(1 + number, output=200))
    return stage


def parked(size: float, *, policy: PolicyConfig = ROTATE) -> Stage:
    """A row for each of 1,000 adapters: all but the residents are parked."""
    return crowd(size, policy=policy, adapters=1000, rows=2048)


def busy_residents(size: float, *, policy: PolicyConfig) -> Stage:
    """256 rows on 32 residents, each with answers of many lengths behind it, beside 10,000 that wait."""
    stage = Stage.of(policy, slots=SLOTS)
    stage.add(SLOTS + of(size, 1000))
    for number in range(256):
        stage.ask(Ask(1 + number % SLOTS, output=8 + number))
    warm_up(stage, 300)
    for number in range(of(size, 10_000)):
        stage.ask(Ask(1 + SLOTS + number % of(size, 1000), priority=number % 3))
    return stage


def tenants_of_one_adapter(size: float, *, policy: PolicyConfig) -> Stage:
    """2,000 requests of 500 tenants wait for one adapter, beside seven others."""
    stage = Stage.of(policy, slots=4, rows=64)
    stage.add(8)
    for number in range(8):
        stage.ask(Ask(1 + number, output=500, tenant=f"t{number}"))
    for number in range(of(size, 2000)):
        stage.ask(Ask(1, tenant=f"t{number % of(size, 500)}"))
    return stage


def tenants_of_many_adapters(size: float, *, policy: PolicyConfig) -> Stage:
    """1,000 tenants with an adapter each."""
    stage = Stage.of(policy, slots=SLOTS)
    adapters = of(size, 1000)
    stage.add(adapters)
    for number in range(2 * adapters):
        stage.ask(Ask(1 + number % adapters, tenant=f"t{number % adapters}"))
    return stage


def tenants_without_room(size: float, *, policy: PolicyConfig = ROTATE) -> Stage:
    """One tenant holds every row and block, and 500 others wait on every resident."""
    stage = Stage.of(policy, slots=SLOTS, blocks=4096)
    stage.add(SLOTS)
    for number in range(256):
        stage.ask(Ask(1 + number % SLOTS, output=4000, tenant="first"))
    warm_up(stage)
    for number in range(of(size, 2000)):
        stage.ask(Ask(1 + number % SLOTS, prompt=200, tenant=f"t{number % of(size, 500)}"))
    return stage


def kv_short(size: float, *, policy: PolicyConfig, adapters: int = 64) -> Stage:
    """256 rows grow together into KV that is too small for them, so that sequences are preempted again and again."""
    stage = Stage.of(policy, slots=SLOTS, blocks=1400)
    stage.add(adapters)
    for number in range(256 + of(size, 2000)):
        stage.ask(Ask(1 + number % adapters, prompt=64, output=200))
    return stage


def base_waits(size: float, *, is_delayed: bool = False) -> Stage:
    """10,000 requests for the base model beside 256 that run."""
    policy = PolicyConfig(enable_prefill_delayer=True, prefill_delayer_queue_min_ratio=0.3) if is_delayed else ROTATE
    stage = Stage.of(policy)
    for number in range(256 + of(size, 10_000)):
        stage.ask(Ask(output=100 + number % 64))
    return stage


def warm_up(stage: Stage, steps: int = 20) -> None:
    for _ in range(steps):
        stage.step(lambda: None)


def shapes() -> dict[str, Shape]:
    """By name; of each only the number of requests, adapters or tenants that wait grows with the size."""
    found: dict[str, Shape] = {
        "pinned, 2,000 urgent for one adapter": partial(pinned_and_urgent, adapters=1),
        "pinned, 2,000 urgent for 2,000 adapters": partial(pinned_and_urgent, adapters=2000),
        "120 prompts of 32k, KV for one": partial(long_prompts, blocks=2_600, adapters=0),
        "120 prompts of 32k, KV for ten": partial(long_prompts, blocks=22_000, adapters=0),
        "120 prompts of 32k, 120 adapters": partial(long_prompts, blocks=22_000, adapters=120),
        "120 prompts of 32k, 120 adapters, KV for one": partial(long_prompts, blocks=2_600, adapters=120),
        "256 rows grow without KV": partial(kv_short, policy=ROTATE),
        "500 tenants without room": tenants_without_room,
        "10,000 wait for base": base_waits,
        "10,000 wait for base, delayed": partial(base_waits, is_delayed=True),
    }
    for name, policy in BY_NAME.items():
        found |= {
            f"1,000 adapters, 128 in host memory ({name})": partial(on_disk, policy=policy),
            f"1,000 adapters, 128 in host memory, 8 rows ({name})": partial(on_disk, policy=policy, rows=8),
            f"1,000 adapters, 128 in host memory, no KV ({name})": partial(on_disk, policy=policy, blocks=64),
            f"5,000 adapters ({name})": partial(crowd, policy=policy),
            f"5,000 adapters, 64 rows ({name})": partial(crowd, policy=policy, rows=64),
            f"1,000 parked ({name})": partial(parked, policy=policy),
            f"32 busy residents, 10,000 wait ({name})": partial(busy_residents, policy=policy),
            f"500 tenants of one adapter ({name})": partial(tenants_of_one_adapter, policy=policy),
            f"1,000 tenants, an adapter each ({name})": partial(tenants_of_many_adapters, policy=policy),
        }
    return found
