"""A new version lies on the device before it counts as added, and the old one answers meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rota.core.adapter import Adapter
from rota.core.events import AdapterAdded, AdapterRemoved, FinishReason, SlotChanged, SlotReason, SlotState
from rota.core.ids import AdapterId
from rota.core.messages import AddAdapter, RemoveAdapter
from rota.llm.config import build_device, engine_config
from tests.builders import submit
from tests.engine.lora.adapter_factory import greedy_answer, load_with_peft, make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.in_process import InProcessService
from tests.runtime.services import Listener
from tests.worlds import outputs

PROMPT = (5, 9, 77, 130, 4)
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
