"""Embeddings are made of the hidden states that transformers and PEFT find, whatever way the prompt takes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import PreTrainedModel

from rota.core.events import Event, Preempted
from rota.core.ids import AdapterId, Row
from rota.core.plan import Chunk, Pool, StepPlan
from rota.core.request import Pooling
from rota.engine.step.frames import mixed_frame
from rota.engine.step.graphs import StepGraphs
from tests.builders import request
from tests.engine.guided_story import ADAPTERS, GuidedServer
from tests.engine.hand import no_graph
from tests.engine.lora.adapter_factory import load_with_peft, make_adapter
from tests.engine.lora.mixed_server import adapter
from tests.engine.model_factory import FAMILIES, make_tiny_model
from tests.worlds import endings, outputs

POOLINGS: tuple[Pooling, ...] = ("last", "mean")
LENGTHS = (1, 2, 9, 40, 61)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, list[PreTrainedModel]]:
    """A model and its adapters; by adapter, what PEFT makes of it."""
    root = tmp_path_factory.mktemp("pooled")
    model = make_tiny_model(root / "model", "llama3")
    for number in range(1, ADAPTERS + 1):
        make_adapter(root / str(number), model, seed=number, r=4)
    return root, [model, *(load_with_peft(root / str(number), model) for number in range(1, ADAPTERS + 1))]


def prompt_of(length: int) -> tuple[int, ...]:
    dice = random.Random(length)
    return tuple(dice.randrange(3, 250) for _ in range(length))


def right(model: PreTrainedModel, prompt: tuple[int, ...], pooling: Pooling) -> list[float]:
    with torch.inference_mode():
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
    found: list[float] = (states.mean(0) if pooling == "mean" else states[-1]).tolist()
    return found


def asked(adapters: range) -> list:
    return [
        request(f"{pooling} {length} {number}", prompt_of(length), 12, adapter=AdapterId(number), pooling=one)
        for length in LENGTHS
        for number in adapters
        for pooling, one in (*zip(POOLINGS, POOLINGS, strict=True), ("answered", None))
    ]


def assert_right(events: list[Event], models: list[PreTrainedModel]) -> None:
    for id, end in endings(events).items():
        pooling, length, number = id.split()
        if pooling == "answered":
            assert end.embedding is None
            continue
        assert end.fault is None
        assert end.embedding is not None
        expected = right(models[int(number)], prompt_of(int(length)), pooling)
        assert list(end.embedding) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("depth", "kv_blocks"), [(2, 14), (1, 300)], ids=["preempted", "room for all"])
def test_embeddings_are_those_of_peft_among_answers_and_rotations(world, depth: Literal[1, 2], kv_blocks):
    root, models = world
    server = GuidedServer(root / "model", depth, kv_blocks)
    server.add(*(adapter(number, root) for number in range(1, ADAPTERS + 1)))
    requests = asked(range(ADAPTERS + 1))
    events = server.serve(requests)
    server.engine.close()

    assert_right(events, models)
    assert len(endings(events)) == len(requests)
    assert set(outputs(events)) == {one.request_id for one in requests if one.pooling is None}
    assert kv_blocks > 100 or any(isinstance(event, Preempted) for event in events)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_s_hidden_states_are_those_behind_its_last_norm(family, tmp_path):
    model = make_tiny_model(tmp_path, family)
    server = GuidedServer(tmp_path, 2, 300)
    events = server.serve(asked(range(1)))
    server.engine.close()

    assert_right(events, [model])


def test_a_step_that_pools_goes_without_a_graph():
    frame = mixed_frame(decodes=4, prompt_tokens=32)
    graphs = StepGraphs([(frame, False)], no_graph)
    graphs.capture_next()
    plain = StepPlan(step_id=1, chunks=(Chunk(row=Row(0), start=0, length=8, samples=True),))
    pooling = StepPlan(step_id=1, chunks=plain.chunks, pools=(Pool(Row(0), "last"),))

    assert graphs.frame_for(plain, has_adapters=False) == frame
    assert graphs.frame_for(pooling, has_adapters=False) is None
