"""An adapter that one rank cannot copy into its slot is lost on all of them, and its neighbours notice nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.core.ids import BASE, AdapterId, Row, Slot
from rota.core.messages import AdapterFetched, Message
from rota.core.plan import NO_TOKEN, Load, StepPlan
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.lora.mixed_server import adapter
from tests.engine.model_factory import make_tiny_model
from tests.engine.parallel.ranks import GroupDevice
from tests.engine.parallel.story import GroupServer, prompt_of
from tests.waiting import until


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lost")
    model = make_tiny_model(folder / "model", "llama3")
    for number in (1, 2):
        make_adapter(folder / str(number), model, seed=number)
    return folder


def run(device: GroupDevice, plan: StepPlan) -> tuple[int, ...]:
    return device.collect(device.submit(plan)).tokens


@pytest.mark.parametrize("broken", [0, 1])
def test_a_row_gets_no_token_on_any_rank_if_one_rank_could_not_copy_its_adapter(broken, folder, group_of):
    ranks = group_of(2)
    device = GroupServer(folder / "model", ranks).engine
    messages: list[Message] = []
    device.listen(messages.append)
    seats, chunks = zip(prompt_of(0, BASE), prompt_of(1, 1), prompt_of(2, 2), strict=True)
    run(device, StepPlan(step_id=1, fetches=(adapter(1, folder), adapter(2, folder))))
    assert until(lambda: sum(isinstance(message, AdapterFetched) for message in messages) == 2)

    run(device, StepPlan(step_id=2, loads=(Load(adapter_id=AdapterId(1), slot=Slot(0)),)))
    whole = run(
        device, StepPlan(step_id=3, loads=(Load(adapter_id=AdapterId(2), slot=Slot(1)),), seats=seats, chunks=chunks)
    )
    ranks.tell("break_copies", broken)
    ranks.answers("broken")
    lost = run(
        device, StepPlan(step_id=4, loads=(Load(adapter_id=AdapterId(2), slot=Slot(1)),), seats=seats, chunks=chunks)
    )
    decoded = run(device, StepPlan(step_id=5, decodes=(Row(0), Row(1), Row(2))))

    assert NO_TOKEN not in whole
    assert lost == (*whole[:2], NO_TOKEN)
    assert decoded[2] == NO_TOKEN
    assert NO_TOKEN not in decoded[:2]


def test_all_ranks_hold_as_many_blocks_as_the_one_with_the_fewest(folder, group_of):
    server = GroupServer(folder / "model", None)
    device = group_of(2).build(server.config, kv_blocks=(30, 17))

    assert device.capacity.blocks == 17
