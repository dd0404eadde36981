"""Whatever way a request takes through the engine, it gets the tokens `transformers` would give it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rota.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from rota.core.events import Admitted, Event, Finished, Preempted
from rota.core.ids import RequestId
from rota.core.request import Request, SamplingParams
from rota.engine.build import build_engine
from rota.engine.families.table import read_spec
from rota.engine.folders.builtin import builtin_model_folder
from rota.runtime.live import LiveWorld
from rota.runtime.loop import run
from rota.runtime.seeds import seeded
from rota.scheduler import Scheduler
from rota.text.tokenizer import Tokenizer
from tests.builders import request
from tests.engine.agreement import choices
from tests.engine.lora.adapter_factory import greedy_answer, make_adapter
from tests.engine.lora.mixed_server import adapter
from tests.engine.model_factory import FAMILIES, make_tiny_model
from tests.engine.row_story import FewRows, asked, logprobs
from tests.offline import OfflineInbox
from tests.scheduler.balance import check_balance
from tests.worlds import outputs

NEW_TOKENS = 32


@dataclass(frozen=True)
class Way:
    """How requests travel through the engine."""

    rows: int = 8
    chunk: int = 2048
    kv_blocks: int = 256
    depth: int = 1
    repeats: int = 1


WAYS = {
    "alone": Way(rows=1),
    "batched": Way(),
    "chunked": Way(rows=4, chunk=7),
    "preempted": Way(kv_blocks=24),
    "cached prefix": Way(repeats=2),
    "depth 2": Way(depth=2),
    "depth 2, chunked, preempted": Way(rows=4, chunk=7, kv_blocks=16, depth=2),
}


def serve(
    folder: Path,
    prompts: list[tuple[int, ...]],
    way: Way,
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    new_tokens: int = NEW_TOKENS,
    **sampling: Any,
) -> tuple[list[list[int]], list[Event]]:
    """Answers to all prompts, greedy unless asked otherwise; with repeats, those of the last round."""
    scheduler_config = SchedulerConfig(max_running_requests=way.rows, chunked_prefill_size=way.chunk)
    engine = build_engine(
        EngineConfig(
            model=ModelConfig(model_path=str(folder), dtype="float32", device="cpu", cpu_threads=1),
            cache=CacheConfig(kv_block_size=8, kv_blocks=way.kv_blocks, kv_cache_dtype=kv_cache_dtype),
            scheduler=scheduler_config,
            quiet=True,
        )
    )
    scheduler = Scheduler(scheduler_config, engine.capacity)
    events: list[Event] = []
    for _ in range(way.repeats):
        events = []
        asked: list[Request] = [
            request(f"r{i}", prompt=prompt, max_new_tokens=new_tokens, arrived_at=float(i), **sampling)
            for i, prompt in enumerate(prompts)
        ]
        inbox = OfflineInbox(asked, max_open=100)

        def emit(batch: list[Event], inbox: OfflineInbox = inbox, events: list[Event] = events) -> None:
            events.extend(batch)
            for event in batch:
                if isinstance(event, Finished):
                    inbox.note_ended(event.request_id)

        run(scheduler, LiveWorld(engine, inbox), emit, way.depth)
        check_balance(scheduler)
    given = outputs(events)
    return [given[RequestId(f"r{i}")] for i in range(len(prompts))], events


@pytest.fixture(scope="module")
def family(request, tmp_path_factory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_tiny_model(folder, request.param)


# One family without windows and one with take every way, and the others those two that hold all else.
HARD_WAYS = ("cached prefix", "depth 2, chunked, preempted")
PAIRS = [(name, way) for name in FAMILIES for way in (WAYS if name in ("llama3", "gemma3") else HARD_WAYS)]


@pytest.mark.parametrize(("family", "way"), PAIRS, indirect=["family"])
def test_a_tiny_model_of_every_family_answers_as_transformers_does(family, way):
    folder, model = family
    dice = random.Random(7)
    shared = tuple(dice.randrange(3, 250) for _ in range(20))
    prompts = [
        (shared if i % 2 else ()) + tuple(dice.randrange(3, 250) for _ in range(length))
        for i, length in enumerate([1, 3, 12, 30, 9])
    ]
    answers, events = serve(folder, prompts, WAYS[way])

    assert [len(answer) for answer in answers] == [NEW_TOKENS] * len(prompts)
    assert answers == choices(model, prompts, answers)
    if "preempted" in way and read_spec(folder).widest_window is None:  # with windows, blocks are given back in time
        assert any(isinstance(event, Preempted) for event in events)
    if way == "cached prefix":
        assert all(event.cached_tokens for event in events if isinstance(event, Admitted) and event.request_id == "r3")


def test_a_request_that_samples_gets_the_same_tokens_from_any_engine_preempted_or_not(tmp_path):
    make_tiny_model(tmp_path, FAMILIES[0])
    prompts = [(5, 6, 7), (9, 8, 7, 6), (3, 4), (11, 12, 13, 14, 15)]
    seed = seeded(SamplingParams()).seed  # drawn where a request is made, and by no engine
    served = [serve(tmp_path, prompts, way, temperature=1.0, seed=seed) for way in (Way(), Way(), Way(kv_blocks=16))]

    assert served[0][0] == served[1][0] == served[2][0]
    assert [any(isinstance(event, Preempted) for event in events) for _, events in served] == [False, False, True]


QUESTIONS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colours are",
    "List the days of the week:",
    "Dear Sir or Madam, I am writing to",
    "In 1969, the first man on the moon",
]


def test_the_built_in_model_answers_as_transformers_does():
    folder = builtin_model_folder(quiet=True)
    prompts = [Tokenizer(folder).encode(question) for question in QUESTIONS[:4]]
    answers, _ = serve(folder, prompts, Way(rows=4, chunk=7, kv_blocks=40, depth=2), new_tokens=12)

    assert [len(answer) for answer in answers] == [12] * len(prompts)
    assert answers == choices(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), prompts, answers)


@pytest.mark.long("transformers makes 512 tokens one by one")
def test_the_built_in_model_answers_as_transformers_does_by_itself():
    folder = builtin_model_folder(quiet=True)
    prompts = [Tokenizer(folder).encode(question) for question in QUESTIONS]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    right = [greedy_answer(model, prompt, 64) for prompt in prompts]

    for way in ("batched", "depth 2, chunked, preempted"):
        answers, _ = serve(folder, prompts, replace(WAYS[way], kv_blocks=max(WAYS[way].kv_blocks, 40)), new_tokens=64)
        assert answers == right


# Prompts of 100,000 tokens, whatever stretched the context.

LONGEST, PROMPT = 131_072, 100_000
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
}


def answer(folder: Path, prompt: list[int], tokens: int) -> list[int]:
    config = SchedulerConfig(max_running_requests=1)
    model = ModelConfig(model_path=str(folder), dtype="float32", device="cpu")
    cache = CacheConfig(kv_blocks=LONGEST // 16)
    engine = build_engine(EngineConfig(model=model, cache=cache, scheduler=config, quiet=True))
    inbox, events = OfflineInbox([request("long", prompt=tuple(prompt), max_new_tokens=tokens)], max_open=1), []

    def emit(batch: list[Event]) -> None:
        events.extend(batch)
        for event in batch:
            if isinstance(event, Finished):
                inbox.note_ended(event.request_id)

    run(Scheduler(config, engine.capacity), LiveWorld(engine, inbox), emit, depth=1)
    return outputs(events)["long"]


@pytest.mark.long("attention over 100,000 tokens, twice")
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_prompt_of_100_000_tokens_is_answered_as_transformers_does(tmp_path: Path, scaling: str):
    model = make_tiny_model(
        tmp_path,
        "llama2",
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_theta": 500_000.0, **SCALINGS[scaling]},
    )
    dice = random.Random(3)
    prompt = [dice.randrange(3, 250) for _ in range(PROMPT)]
    with torch.inference_mode():
        right = model.generate(
            torch.tensor([prompt]), max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0
        )[0, PROMPT:].tolist()

    assert answer(tmp_path, prompt, 4) == right


# With keys and values in eight bits a request gets the same tokens as alone, whatever way it takes.

ADAPTERS, FEW_TOKENS = 3, 12
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
    requests, told = asked(ADAPTERS, FEW_TOKENS), []
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
