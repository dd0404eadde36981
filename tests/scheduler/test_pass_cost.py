from __future__ import annotations

import pytest

from rota.core.config import LoraConfig
from rota.core.messages import AdapterFetched
from rota.core.policy_config import PolicyConfig
from tests.counting import calls_in
from tests.scheduler.stage import Stage

SLOTS, ON_HOST = 4, 8


def costliest_pass(stage: Stage, passes: int) -> int:
    """Of so many; whatever is read or copied has arrived by the next one."""
    costs = []
    for _ in range(passes):
        stage.now += 0.02
        calls, plan = calls_in(lambda: stage.scheduler.plan(stage.now))
        stage.finish(plan)
        costs.append(calls)
        for adapter in plan.fetches:
            stage.tell(AdapterFetched(adapter_id=adapter.adapter_id, at=stage.now))
        stage.arrive(*(load.adapter_id for load in plan.loads))
    return max(costs)


def crowded(adapters: int, policy: PolicyConfig, **found: int) -> Stage:
    """Somebody waits for every adapter, and few of these fit into host memory."""
    lora = LoraConfig(max_loras_per_batch=SLOTS, max_loaded_loras=ON_HOST)
    stage = Stage(adapters, policy, lora, slots=SLOTS, **found)
    costliest_pass(stage, passes=adapters // ON_HOST + 2)
    for number in range(1, adapters + 1):
        stage.ask(f"r{number}", number, prompt=(1, 2, 3), max_new_tokens=4)
    return stage


@pytest.mark.parametrize("rows", [2, 64], ids=["few-rows", "many-rows"])
@pytest.mark.parametrize("policy", ["rotate", "drain", "wait"])
def test_a_pass_costs_no_more_the_more_adapters_wait_on_disk(policy, rows):
    policy = PolicyConfig(lora_policy=policy, lora_drain_wait_threshold=0.1)
    few, many = (costliest_pass(crowded(adapters, policy, rows=rows), passes=30) for adapters in (50, 200))

    assert many < 1.5 * few
