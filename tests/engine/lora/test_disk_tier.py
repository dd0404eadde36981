"""Behind host memory lies the disk: adapters that left are read again, ahead of their turns, and answer as before."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota import LLM, SamplingParams
from rota.core.plan import StepPlan
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.tiny_tokenizer import write_byte_tokenizer

NAMES = ("a", "b", "c", "d", "e", "f")
OPTIONS = {"device": "cpu", "dtype": "float32", "kv_blocks": 128, "max_running_requests": 8, "quiet": True}
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    folder = write_byte_tokenizer(tmp_path_factory.mktemp("tier") / "model")
    model = make_tiny_model(folder, "smollm2")
    return folder, {name: make_adapter(folder.parent / name, model, seed=at) for at, name in enumerate(NAMES)}


def answers(llm: LLM, rounds: int) -> list[tuple[int, ...]]:
    asked = [(f"{name} says {turn}", name) for turn in range(rounds) for name in NAMES]
    made = llm.generate([prompt for prompt, _ in asked], GREEDY, adapter=[name for _, name in asked])
    return [tuple(one.token_ids) for one in made]


def test_adapters_are_read_from_disk_before_their_turns_and_answer_as_from_host_memory(place, monkeypatch):
    folder, adapters = place
    everywhere = LLM(folder, adapters=adapters, max_loras_per_batch=1, max_loaded_loras=len(NAMES), **OPTIONS)
    little = LLM(folder, adapters=adapters, max_loras_per_batch=1, max_loaded_loras=3, **OPTIONS)
    device, plans = little._device, list[StepPlan]()
    submit = device.submit
    monkeypatch.setattr(device, "submit", lambda plan: (plans.append(plan), submit(plan))[1])

    assert answers(little, rounds=2) == answers(everywhere, rounds=2)

    orders = [(at, "read", one.adapter_id) for at, plan in enumerate(plans) for one in plan.fetches]
    orders += [(at, "copied", one.adapter_id) for at, plan in enumerate(plans) for one in plan.loads]
    orders.sort()
    assert sum(order == "read" for _, order, _ in orders) >= len(NAMES) - 3, "host memory holds three of them"
    ahead = [
        at
        for at, order, adapter in orders
        if order == "read" and plans[at].tokens and (at, "copied", adapter) not in orders
    ]
    assert ahead, "an adapter was read while others computed, in a step before its own copy"
