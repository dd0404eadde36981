"""Adapters come from the disk and go, and new versions take their places, while others are answered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rota import LLM, SamplingParams
from rota.core.adapter import Adapter
from rota.core.config import EngineConfig
from rota.core.events import AdapterAdded, AdapterRemoved, FinishReason, SlotChanged, SlotReason, SlotState
from rota.core.ids import BASE, AdapterId
from rota.core.messages import AddAdapter, RemoveAdapter
from rota.core.plan import StepPlan
from rota.engine import build
from rota.engine.build import build_engine
from rota.engine.engine import Engine
from rota.engine.lora.host import HostAdapter
from rota.llm.config import build_device, engine_config
from rota.runtime.in_process import InProcessService
from tests.builders import submit
from tests.engine.lora.adapter_factory import greedy_answer, load_with_peft, make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.runtime.services import Listener
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S
from tests.worlds import endings, outputs

PROMPT = (5, 9, 77, 130, 4)
WARM, COLD = AdapterId(1), AdapterId(2)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The disk gives cold adapters only when it is open."""
    opened, reader_for = threading.Event(), build.checkpoint_reader

    def gated(*arguments: Any) -> Callable[[Adapter], HostAdapter]:
        read = reader_for(*arguments)

        def read_behind_gate(adapter: Adapter) -> HostAdapter:
            assert adapter.adapter_id == WARM or opened.wait(TIMEOUT_S)
            return read(adapter)

        return read_behind_gate

    monkeypatch.setattr(build, "checkpoint_reader", gated)
    return opened


def test_others_are_answered_to_their_end_while_a_cold_adapter_is_being_read(gate, tmp_path):
    model = make_tiny_model(tmp_path / "model", "llama3")
    paths = {number: make_adapter(tmp_path / str(number), model, seed=number) for number in (WARM, COLD)}
    right = {number: greedy_answer(load_with_peft(path, model), PROMPT, 12) for number, path in paths.items()}
    options = {"device": "cpu", "dtype": "float32", "kv_blocks": 64, "max_running_requests": 4, "max_lora_rank": 8}
    config = engine_config({"model_path": str(tmp_path / "model"), "max_loras_per_batch": 2, **options}, quiet=True)
    service, listener = InProcessService(lambda: build_device(config), config), Listener()
    service.start(listener)
    try:
        for number, path in paths.items():
            adapter = Adapter(adapter_id=number, name=f"a{number}", path=str(path))
            service.send(AddAdapter(adapter=adapter, at=0.0, is_read_later=True))
            listener.wait_for_adapter(number, AdapterAdded)
        for name, adapter_id in (("cold", COLD), ("warm", WARM), ("base", BASE)):
            service.send(submit(name, prompt=PROMPT, max_new_tokens=12, adapter=adapter_id, ignore_eos=True))
        assert listener.wait_for_ending("warm").reason is FinishReason.LENGTH
        assert listener.wait_for_ending("base").reason is FinishReason.LENGTH
        assert "cold" not in endings(listener.events)
        gate.set()
        listener.wait_for_ending("cold")
    finally:
        gate.set()
        service.stop()

    answers = outputs(listener.events)
    assert (answers["warm"], answers["cold"]) == (right[WARM], right[COLD])


# A new version lies on the device before it counts as added, and the old one answers meanwhile.

OLD, NEW = AdapterId(1), AdapterId(2)


@pytest.fixture
def adapters(tmp_path: Path) -> dict[AdapterId, tuple[Adapter, list[int]]]:
    """Two versions of one name, each with PEFT's answer."""
    model = make_tiny_model(tmp_path / "model", "llama3")
    made = {}
    for number in (OLD, NEW):
        path = make_adapter(tmp_path / str(number), model, seed=number)
        answer = greedy_answer(load_with_peft(path, model), PROMPT, 12)
        made[number] = Adapter(adapter_id=number, name="poet", path=str(path), version=number), answer
    return made


@pytest.fixture
def serving(tmp_path: Path, adapters) -> Iterator[tuple[InProcessService, Listener]]:
    """A server that has the old version."""
    options = {"device": "cpu", "dtype": "float32", "kv_blocks": 64, "max_running_requests": 4}
    config = engine_config(
        {"model_path": str(tmp_path / "model"), "max_loras_per_batch": 2, "max_lora_rank": 8, **options}, quiet=True
    )
    service, listener = InProcessService(lambda: build_device(config), config), Listener()
    service.start(listener)
    service.send(AddAdapter(adapter=adapters[OLD][0], at=0.0))
    try:
        yield service, listener
    finally:
        service.stop()


def ask(service: InProcessService, id: str, adapter: AdapterId, tokens: int) -> None:
    service.send(submit(id, prompt=PROMPT, max_new_tokens=tokens, adapter=adapter, ignore_eos=True))


def test_a_version_is_in_a_slot_before_it_counts_as_added_and_its_first_request_orders_no_copy(adapters, serving):
    service, listener = serving
    ask(service, "long", OLD, 100)
    listener.wait_for_tokens("long")
    service.send(AddAdapter(adapter=adapters[NEW][0], at=0.0, former=OLD))
    listener.wait_for_adapter(NEW, AdapterAdded)

    told = [event for event in listener.events if isinstance(event, SlotChanged | AdapterAdded)]
    news = [event for event in told if event.adapter_id == NEW]
    assert [getattr(event, "state", "added") for event in news] == [SlotState.LOADING, SlotState.READY, "added"]
    assert news[0].reason is SlotReason.NEW_VERSION
    ask(service, "first", NEW, 12)
    assert listener.wait_for_ending("first").reason is FinishReason.LENGTH
    assert listener.wait_for_ending("long").reason is FinishReason.LENGTH
    service.send(RemoveAdapter(adapter_id=OLD, at=0.0, takes_requests=True))
    listener.wait_for_adapter(OLD, AdapterRemoved)

    answers = outputs(listener.events)
    assert answers["long"][:12] == adapters[OLD][1]
    assert answers["first"] == adapters[NEW][1]
    copies = [event for event in listener.events if isinstance(event, SlotChanged) and event.state is SlotState.LOADING]
    assert [event.adapter_id for event in copies] == [OLD, NEW]


def test_a_version_that_takes_the_old_ones_place_answers_as_peft_does(adapters, serving):
    service, listener = serving
    other = replace(adapters[OLD][0], adapter_id=AdapterId(3), name="other")
    service.send(AddAdapter(adapter=other, at=0.0))
    for adapter in (adapters[OLD][0], other):
        ask(service, f"of {adapter.name}", adapter.adapter_id, 2)
        listener.wait_for_ending(f"of {adapter.name}")
    service.send(AddAdapter(adapter=adapters[NEW][0], at=0.0, former=OLD))
    listener.wait_for_adapter(NEW, AdapterAdded)
    ask(service, "first", NEW, 12)
    listener.wait_for_ending("first")

    assert outputs(listener.events)["first"] == adapters[NEW][1]
    slots = {(event.adapter_id, event.slot) for event in listener.events if isinstance(event, SlotChanged)}
    assert slots == {(OLD, 0), (3, 1), (NEW, 0)}


# Behind host memory lies the disk: adapters that left are read again, ahead of their turns, and answer as before.

NAMES = ("a", "b", "c", "d", "e", "f")
OPTIONS = {"device": "cpu", "dtype": "float32", "kv_blocks": 128, "max_running_requests": 8, "quiet": True}
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    folder = write_byte_tokenizer(tmp_path_factory.mktemp("tier") / "model")
    model = make_tiny_model(folder, "smollm2")
    return folder, {name: make_adapter(folder.parent / name, model, seed=at) for at, name in enumerate(NAMES)}


def answers(llm: LLM, rounds: int) -> list[tuple[int, ...]]:
    asked = [(f"{name} says {turn}", name) for turn in range(rounds) for name in NAMES]
    made = llm.generate([prompt for prompt, _ in asked], GREEDY, adapter=[name for _, name in asked])
    return [tuple(one.token_ids) for one in made]


def test_adapters_are_read_from_disk_before_their_turns_and_answer_as_from_host_memory(tier, monkeypatch):
    folder, adapters = tier
    everywhere = LLM(folder, adapters=adapters, max_loras_per_batch=1, max_loaded_loras=len(NAMES), **OPTIONS)
    plans: list[StepPlan] = []

    def build_noting(config: EngineConfig) -> Engine:
        engine = build_engine(config)
        submit = engine.submit
        engine.submit = lambda plan: (plans.append(plan), submit(plan))[1]
        return engine

    monkeypatch.setattr("rota.llm.llm.build_device", build_noting)
    little = LLM(folder, adapters=adapters, max_loras_per_batch=1, max_loaded_loras=3, **OPTIONS)

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
