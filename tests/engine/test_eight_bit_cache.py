"""With keys and values in eight bits a request gets the same tokens whatever way it takes through the engine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rota.core.config import CacheConfig, EngineConfig, ModelConfig
from rota.core.events import Admitted, Preempted
from rota.engine.build import build_engine
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.lora.mixed_server import adapter
from tests.engine.model_factory import make_tiny_model
from tests.engine.row_story import FewRows, asked, logprobs
from tests.engine.ways import WAYS, Way, serve
from tests.worlds import outputs

ADAPTERS, NEW_TOKENS = 3, 12
EIGHT_BITS = {"kv_cache_dtype": "fp8"}


@pytest.fixture(scope="module", params=["llama3", "gemma3"])
def alone(request, tmp_path_factory) -> tuple[Path, list[tuple[int, ...]], list[list[int]]]:
    """A tiny model, prompts that begin alike in part, and the answer to each by itself. Gemma has windows."""
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, request.param)
    dice = random.Random(7)
    shared = tuple(dice.randrange(3, 250) for _ in range(20))
    prompts = [
        (shared if i % 2 else ()) + tuple(dice.randrange(3, 250) for _ in range(length))
        for i, length in enumerate([1, 12, 30, 9])
    ]
    return folder, prompts, [serve(folder, [prompt], WAYS["alone"], "fp8")[0][0] for prompt in prompts]


@pytest.mark.parametrize("way", ["batched", "chunked", "cached prefix", "depth 2"])
def test_an_answer_is_that_of_the_sequence_alone_whatever_way_it_takes(alone, way):
    folder, prompts, right = alone
    answers, events = serve(folder, prompts, WAYS[way], "fp8")

    assert answers == right
    if way == "cached prefix":
        assert all(event.cached_tokens for event in events if isinstance(event, Admitted) and event.request_id == "r3")


def test_a_preempted_sequence_computes_the_keys_again_that_it_had(alone):
    folder, prompts, right = alone
    answers, events = serve(folder, prompts, Way(rows=4, chunk=7, kv_blocks=12, depth=2), "fp8")
    assert answers == right
    assert any(isinstance(event, Preempted) for event in events)


def test_long_and_short_rows_beside_each_other_are_answered_as_each_alone(tmp_path):
    make_tiny_model(tmp_path, "llama2", max_position_embeddings=4096)
    dice = random.Random(3)
    prompts = [tuple(dice.randrange(3, 250) for _ in range(length)) for length in (2300, 5, 40)]
    right = [serve(tmp_path, [prompt], Way(rows=1, kv_blocks=320), "fp8")[0][0] for prompt in prompts]
    assert serve(tmp_path, prompts, Way(kv_blocks=320), "fp8")[0] == right


def test_answers_with_adapters_are_the_same_if_rows_and_slots_change_hands_all_the_time(tmp_path):
    model = make_tiny_model(tmp_path / "model", "llama3")
    for number in range(1, ADAPTERS + 1):
        make_adapter(tmp_path / str(number), model, seed=number, r=4)
    requests, told = asked(ADAPTERS, NEW_TOKENS), []
    for rows in (len(requests), 3):
        server = FewRows(tmp_path / "model", rows, 2, EIGHT_BITS)
        server.add(*(adapter(number, tmp_path) for number in range(1, ADAPTERS + 1)))
        told.append(server.serve(requests))
        server.engine.close()

    assert outputs(told[1]) == outputs(told[0])
    for id, right in logprobs(told[0]).items():
        assert [one.chosen for one in logprobs(told[1])[id]] == pytest.approx([one.chosen for one in right], abs=1e-3)


def test_an_engine_says_what_it_keeps_keys_and_values_in(tmp_path):
    make_tiny_model(tmp_path, "llama2")
    model = ModelConfig(model_path=str(tmp_path), dtype="float32", device="cpu")
    for fields, dtype in (({}, "float32"), (EIGHT_BITS, "float8_e4m3fn")):
        engine = build_engine(EngineConfig(model=model, cache=CacheConfig(kv_blocks=32, **fields), quiet=True))
        assert engine.capacity.kv_dtype == dtype
        engine.close()
