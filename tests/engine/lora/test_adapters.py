"""Rows follow their adapter from slot to slot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rota.core.adapter import Adapter
from rota.core.ids import AdapterId, Row, Slot
from rota.core.messages import AdapterFailed, AdapterFetched, Message
from rota.core.plan import Chunk, Load, Seat, StepPlan
from rota.core.request import SamplingParams
from rota.engine.lora.adapters import Adapters
from rota.engine.lora.bank import Bank
from rota.engine.lora.loader import checkpoint_reader
from rota.engine.lora.reference import project_with_lora
from rota.engine.model.spec import ModelSpec
from tests.engine.lora.adapter_factory import make_adapter

A, B, C = map(AdapterId, (1, 2, 3))


@pytest.fixture
def adapters(model: PreTrainedModel, spec: ModelSpec, tmp_path):
    bank = Bank(spec, 3, 8, torch.float32, torch.device("cpu"))
    adapters = Adapters(bank, checkpoint_reader(bank, spec), project_with_lora, rows=4, overlaps=False)
    adapters.listen(lambda _: None)
    folder = str(make_adapter(tmp_path / "adapter", model))
    adapters.accept(
        StepPlan(
            step_id=0, fetches=tuple(Adapter(adapter_id=one, name=f"adapter {one}", path=folder) for one in (A, B, C))
        )
    )
    return adapters


def seat(row: int, adapter: AdapterId) -> Seat:
    return Seat(
        request_id="request",
        row=Row(row),
        adapter_id=adapter,
        tokens=(1,),
        prompt_length=1,
        blocks=(),
        sampling=SamplingParams(),
    )


def slots_of(adapters: Adapters, *rows: int) -> list[int]:
    return adapters.slots_of(np.array(rows)).tolist()


def test_a_row_that_comes_back_goes_through_the_slot_its_adapter_is_in_now(adapters):
    adapters.accept(StepPlan(step_id=1, loads=(Load(adapter_id=A, slot=Slot(0)),), seats=(seat(0, A),)))
    assert slots_of(adapters, 0) == [0]
    adapters.accept(StepPlan(step_id=2, loads=(Load(adapter_id=B, slot=Slot(0)),)))
    adapters.accept(StepPlan(step_id=3, loads=(Load(adapter_id=A, slot=Slot(2)),)))
    assert slots_of(adapters, 0) == [2]


def test_whoever_takes_a_slot_an_adapter_left_long_ago_does_not_take_its_rows_along(adapters):
    adapters.accept(StepPlan(step_id=1, loads=(Load(adapter_id=A, slot=Slot(0)),), seats=(seat(0, A),)))
    adapters.accept(
        StepPlan(step_id=2, loads=(Load(adapter_id=A, slot=Slot(2)),))
    )  # it left slot 0 and came back elsewhere
    adapters.accept(StepPlan(step_id=3, loads=(Load(adapter_id=B, slot=Slot(0)),), seats=(seat(1, A), seat(2, B))))
    assert slots_of(adapters, 0, 1, 2) == [2, 2, 0]


def test_a_row_whose_adapter_was_overwritten_must_not_be_in_a_step(adapters):
    adapters.accept(StepPlan(step_id=1, loads=(Load(adapter_id=A, slot=Slot(0)),), seats=(seat(0, A),)))
    adapters.accept(StepPlan(step_id=2, loads=(Load(adapter_id=C, slot=Slot(0)),)))
    with pytest.raises(AssertionError, match="in no slot"):
        slots_of(adapters, 0)


def test_a_row_whose_adapter_lost_a_page_to_another_slot_must_not_be_in_a_step(model, spec, tmp_path):
    bank = Bank(spec, 3, 16, torch.float32, torch.device("cpu"), pages=4)
    adapters = Adapters(bank, checkpoint_reader(bank, spec), project_with_lora, rows=4, overlaps=False)
    messages: list[Message] = []
    adapters.listen(messages.append)
    paths = {one: str(make_adapter(tmp_path / str(one), model, r=rank)) for one, rank in ((A, 12), (B, 4), (C, 8))}
    fetches = tuple(Adapter(adapter_id=one, name=f"adapter {one}", path=path) for one, path in paths.items())
    adapters.accept(StepPlan(step_id=0, fetches=fetches, seats=(seat(0, A), seat(1, B), seat(2, C))))

    first = (
        Load(adapter_id=A, slot=Slot(0), pages=(3, 1)),
        Load(adapter_id=B, slot=Slot(1), pages=(0,)),
    )
    adapters.accept(StepPlan(step_id=1, loads=first))
    assert slots_of(adapters, 0, 1) == [0, 1]
    adapters.accept(StepPlan(step_id=2, loads=(Load(adapter_id=C, slot=Slot(2), pages=(1,)),)))
    assert slots_of(adapters, 1, 2) == [1, 2]
    with pytest.raises(AssertionError, match="in no slot"):
        slots_of(adapters, 0)
    adapters.accept(StepPlan(step_id=3, loads=(Load(adapter_id=A, slot=Slot(0), pages=(2, 3)),)))
    assert slots_of(adapters, 0, 1, 2) == [0, 1, 2]
    adapters.close()
    told = {message.adapter_id: message.pages for message in messages if isinstance(message, AdapterFetched)}
    assert told == {A: 2, B: 1, C: 1}
    assert not any(isinstance(message, AdapterFailed) for message in messages)


def test_a_copy_waits_for_steps_in_flight_only_if_one_of_them_may_read_what_it_overwrites(adapters):
    to_first, to_second = Load(adapter_id=B, slot=Slot(0)), Load(adapter_id=B, slot=Slot(1))
    plan = StepPlan(step_id=1, loads=(Load(adapter_id=A, slot=Slot(0)),), seats=(seat(0, A),), decodes=(Row(0),))
    adapters.accept(plan)
    assert not adapters._may_be_read(to_first)
    for step in (plan, StepPlan(step_id=2, decodes=(Row(3),)), StepPlan(step_id=3)):
        adapters.launch(step)
    assert adapters._may_be_read(to_first)
    assert not adapters._may_be_read(to_second)
    assert adapters._may_be_read(Load(adapter_id=B, slot=Slot(1), pages=(4,)))
    assert adapters._may_be_read(Load(adapter_id=B, slot=Slot(1), matrices=(0,)))
    adapters.note_landing()
    assert not adapters._may_be_read(to_first)


def test_a_chunk_of_a_prompt_reads_its_slot_too(adapters):
    adapters.accept(StepPlan(step_id=1, loads=(Load(adapter_id=A, slot=Slot(2)),), seats=(seat(1, A),)))
    adapters.launch(StepPlan(step_id=2, chunks=(Chunk(row=Row(1), start=0, length=4, samples=False),)))
    assert adapters._may_be_read(Load(adapter_id=B, slot=Slot(2)))
