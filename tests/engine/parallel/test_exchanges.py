"""How often ranks wait for each other, and what they then agree on: sums, blocks, and an adapter that one has lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rota.core.ids import BASE, AdapterId, Row, Slot
from rota.core.messages import AdapterFetched, Message
from rota.core.plan import NO_TOKEN, Load, Scoring, StepPlan
from rota.core.request import SamplingParams
from rota.engine.build import build_engine
from rota.engine.engine import Engine
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.lora.mixed_server import adapter
from tests.engine.model_factory import make_tiny_model
from tests.engine.parallel.ranks import GroupDevice
from tests.engine.parallel.story import PROMPT, GroupServer, prompt_of
from tests.waiting import until

DRAWN = SamplingParams(temperature=1.0, seed=1)


class Counted:
    """Rank 0 of two; the other one always has the same."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def sum(self, x: Tensor) -> Tensor:
        self.counts["sum"] += 1
        return x + x

    def gather(self, x: Tensor) -> Tensor:
        self.counts["gather"] += 1
        return torch.stack((x, x))

    def tokens(self, tokens: Tensor) -> Tensor:
        self.counts["tokens"] += 1
        return tokens

    def least(self, number: int) -> int:
        self.counts["least"] += 1
        return number

    def close(self) -> None:
        """Nothing is open."""


def build(folder, group: Counted | None) -> Engine:
    config = GroupServer.config_of(folder)
    size = 1 if group is None else group.size
    return build_engine(replace(config, model=replace(config.model, tensor_parallel_size=size)), group)


def counted(engine: Engine, group: Counted, plan: StepPlan) -> Counter[str]:
    group.counts.clear()
    engine.collect(engine.submit(plan))
    return group.counts


@pytest.mark.parametrize(("family", "sums"), [("llama3", 2), ("gemma3", 2), ("olmo2", 3)])
def test_a_step_has_two_sums_a_layer_and_a_third_where_norms_are_over_all_heads(family, sums, tmp_path):
    make_tiny_model(tmp_path, family)
    group = Counted()
    engine = build(tmp_path, group)
    layers = engine.spec.layers
    (greedy, chunk), (drawn, other) = prompt_of(0), prompt_of(1, sampling=DRAWN)
    scoring = Scoring(row=Row(0), start=1, end=len(PROMPT), top=1)

    assert counted(engine, group, StepPlan(step_id=1)) == {}
    steps = {
        "a greedy prompt": (StepPlan(step_id=1, seats=(greedy,), chunks=(chunk,)), {"gather": 1}),
        "a greedy decode": (StepPlan(step_id=2, decodes=(Row(0),)), {"gather": 1}),
        "a prompt that draws": (StepPlan(step_id=3, seats=(drawn,), chunks=(other,)), {"gather": 2, "tokens": 1}),
        "both": (StepPlan(step_id=4, decodes=(Row(0), Row(1))), {"gather": 2, "tokens": 1}),
        "scores": (StepPlan(step_id=5, seats=(greedy,), chunks=(chunk,), scorings=(scoring,)), {"gather": 2}),
    }
    for name, (plan, others) in steps.items():
        assert counted(engine, group, plan) == {"sum": sums * layers, **others}, name
    engine.close()


def test_ranks_agree_nine_times_before_their_first_step(tmp_path):
    make_tiny_model(tmp_path, "llama3")
    group = Counted()
    build(tmp_path, group).close()

    # Adapters at the start, their rank, pages, extras and matrices; places for matrices, slots, pages and blocks.
    assert group.counts["least"] == 9


# An adapter that one rank cannot copy into its slot is lost on all of them, and its neighbours notice nothing.


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
