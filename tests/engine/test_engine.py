"""An engine turns hand-written plans into the tokens that transformers would give."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.errors import ConfigError
from rota.core.plan import StepPlan
from rota.core.request import SamplingParams
from rota.engine.build import build_engine
from rota.engine.engine import FEW_DECODES, Engine
from rota.engine.lora.bank import slot_bytes
from tests.engine.hand import BLOCK_SIZE, BLOCKS, GREEDY, OTHER, PROMPT, ROWS, Hand, expected
from tests.engine.model_factory import make_tiny_model

HAS_GPU = torch.cuda.is_available()


def config(folder: Path, **model: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model_path=str(folder), **{"dtype": "float32", "device": "cpu", **model}),
        cache=CacheConfig(kv_block_size=BLOCK_SIZE, kv_blocks=BLOCKS),
        scheduler=SchedulerConfig(max_running_requests=ROWS),
        quiet=True,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("llama3")
    return folder, make_tiny_model(folder, "llama3")


@pytest.fixture(scope="module")
def folder(made: tuple[Path, PreTrainedModel]) -> Path:
    return made[0]


@pytest.fixture(scope="module")
def oracle(made: tuple[Path, PreTrainedModel]) -> PreTrainedModel:
    return made[1]


@pytest.fixture
def engine(folder: Path) -> Engine:
    return build_engine(config(folder))


def test_greedy_tokens_equal_those_of_transformers(engine: Engine, oracle: PreTrainedModel):
    hand = Hand(engine)
    hand.seat(2, PROMPT)
    first = hand.step((2, 0, len(PROMPT), True)).tokens
    assert [*first, *hand.decode(2, 19)] == expected(oracle, PROMPT, 20)


def test_a_prompt_in_chunks_gives_nothing_until_its_last_chunk(engine: Engine, oracle: PreTrainedModel):
    hand = Hand(engine)
    hand.seat(0, PROMPT)
    assert hand.step((0, 0, 7, False)).tokens == ()
    assert hand.step((0, 7, 7, False)).tokens == ()
    first = hand.step((0, 14, 9, True)).tokens
    assert [*first, *hand.decode(0, 15)] == expected(oracle, PROMPT, 16)


def test_decodes_and_chunks_share_a_step_and_tokens_come_decodes_first(engine: Engine, oracle: PreTrainedModel):
    hand = Hand(engine)
    hand.seat(3, PROMPT)
    found = {3: list(hand.step((3, 0, len(PROMPT), True)).tokens), 1: []}
    hand.seat(1, OTHER)
    found[3] += hand.step((1, 0, 4, False), decodes=(3,)).tokens
    mixed = hand.step((1, 4, 2, True), decodes=(3,)).tokens
    found[3].append(mixed[0])
    found[1].append(mixed[1])
    for _ in range(12):
        for row, token in zip((1, 3), hand.step(decodes=(1, 3)).tokens, strict=True):
            found[row].append(token)
    assert found[3] == expected(oracle, PROMPT, 15)
    assert found[1] == expected(oracle, OTHER, 13)


def test_a_sequence_reads_the_blocks_another_one_wrote(engine: Engine, oracle: PreTrainedModel):
    hand = Hand(engine)
    blocks = hand.seat(0, PROMPT)
    hand.step((0, 0, len(PROMPT), True))
    longer = PROMPT[:16] + OTHER
    hand.seat(1, longer, shared=blocks[:2])
    first = hand.step((1, 16, len(OTHER), True)).tokens
    assert [*first, *hand.decode(1, 15)] == expected(oracle, longer, 16)


def test_a_preempted_sequence_sits_down_elsewhere_and_goes_on(engine: Engine, oracle: PreTrainedModel):
    hand = Hand(engine)
    hand.seat(0, PROMPT)
    found = [*hand.step((0, 0, len(PROMPT), True)).tokens, *hand.decode(0, 7)]
    hand.seat(2, PROMPT + tuple(found), prompt_length=len(PROMPT))
    found += hand.step((2, 0, len(PROMPT) + 8, True)).tokens
    assert found + hand.decode(2, 7) == expected(oracle, PROMPT, 16)


def test_a_row_changes_hands_while_its_old_step_is_still_in_flight(engine: Engine, oracle: PreTrainedModel):
    hand = Hand(engine)
    hand.seat(1, PROMPT)
    hand.step((1, 0, len(PROMPT), True))
    old = engine.submit(hand.plan(decodes=(1,)))
    hand.seat(1, OTHER)
    new = engine.submit(hand.plan((1, 0, len(OTHER), True)))
    newer = engine.submit(hand.plan(decodes=(1,)))
    assert list(engine.collect(old).tokens) == expected(oracle, PROMPT, 2)[1:]
    assert [*engine.collect(new).tokens, *engine.collect(newer).tokens] == expected(oracle, OTHER, 2)


def test_tokens_need_not_come_back_before_the_next_step_begins(engine: Engine, oracle: PreTrainedModel):
    hand = Hand(engine)
    hand.seat(0, PROMPT)
    tickets = [engine.submit(hand.plan((0, 0, len(PROMPT), True)))]
    tickets += [engine.submit(hand.plan(decodes=(0,))) for _ in range(9)]
    found = [engine.collect(ticket).tokens[0] for ticket in tickets]
    assert found == expected(oracle, PROMPT, 10)


def test_a_seed_repeats_alone_in_company_and_after_preemption(engine: Engine):
    chance = SamplingParams(temperature=1.5, top_p=0.9, seed=4, frequency_penalty=0.5)
    hand = Hand(engine)
    hand.seat(0, PROMPT, sampling=chance)
    alone = [*hand.step((0, 0, len(PROMPT), True)).tokens, *hand.decode(0, 9)]

    hand.seat(1, OTHER)
    hand.seat(3, PROMPT, sampling=chance)
    _, first = hand.step((1, 0, len(OTHER), True), (3, 0, len(PROMPT), True)).tokens
    begun = [first] + [hand.step(decodes=(3, 1)).tokens[0] for _ in range(4)]
    hand.seat(2, PROMPT + tuple(begun), prompt_length=len(PROMPT), sampling=chance)
    (next_token,) = hand.step((2, 0, len(PROMPT) + 5, True)).tokens
    assert [*begun, next_token, *hand.decode(2, 4)] == alone
    assert len(set(alone)) > 5


def test_logprobs_come_for_the_rows_that_asked(engine: Engine, oracle: PreTrainedModel):
    hand = Hand(engine)
    hand.seat(0, OTHER)
    hand.seat(1, PROMPT, sampling=replace(GREEDY, logprobs=3))
    result = hand.step((0, 0, len(OTHER), True), (1, 0, len(PROMPT), True))
    ((position, found),) = result.logprobs
    with torch.inference_mode():
        reference = oracle(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    top = reference.topk(3)
    assert position == 1
    assert found.chosen == pytest.approx(float(reference[result.tokens[1]]), abs=1e-4)
    assert [token for token, _ in found.top] == top.indices.tolist()
    assert [logprob for _, logprob in found.top] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert hand.step(decodes=(0,)).logprobs == ()


def test_a_step_s_time_is_when_it_was_collected(engine: Engine):
    hand = Hand(engine)
    hand.seat(0, OTHER)
    ticket = engine.submit(hand.plan((0, 0, len(OTHER), True)))
    before = time.monotonic()
    assert before <= engine.collect(ticket).at <= time.monotonic()


def test_a_plan_without_work_is_done_at_once(engine: Engine):
    assert Hand(engine).step().tokens == ()


def test_the_capacity_says_what_was_found(folder: Path):
    capacity = build_engine(config(folder, context_length=100)).capacity
    assert (capacity.blocks, capacity.block_size, capacity.rows) == (BLOCKS, BLOCK_SIZE, ROWS)
    assert (capacity.max_sequence_tokens, capacity.vocabulary) == (100, 256)


def test_the_capacity_says_what_the_slots_for_adapters_take(folder: Path):
    asked = replace(config(folder), lora=LoraConfig(max_loras_per_batch=3, max_lora_rank=8))
    engine = build_engine(asked)
    place = slot_bytes(engine.spec, 8, torch.float32)
    assert engine.capacity.adapter_bytes == 3 * place
    assert engine.capacity.slot_bytes == place, "what a fourth would take"
    assert (
        build_engine(replace(asked, lora=LoraConfig(max_loras_per_batch=4, max_lora_rank=8))).capacity.adapter_bytes
        == 4 * place
    )


def test_the_shortest_context_still_works(folder: Path, oracle: PreTrainedModel):
    hand = Hand(build_engine(config(folder, context_length=2)))
    hand.seat(0, OTHER[:1], room=BLOCK_SIZE)
    assert list(hand.step((0, 0, 1, True)).tokens) == expected(oracle, OTHER[:1], 1)


def test_a_context_longer_than_the_model_s_is_refused(folder: Path):
    with pytest.raises(ConfigError, match="context_length is 513, but the model was made for 512 tokens"):
        build_engine(config(folder, context_length=513))


def test_dummy_weights_have_the_model_s_shape(folder: Path):
    hand = Hand(build_engine(config(folder, load_format="dummy")))
    hand.seat(0, PROMPT)
    (token,) = hand.step((0, 0, len(PROMPT), True)).tokens
    assert 0 <= token < 256


@pytest.mark.parametrize("context_length", [2, 3, 4, BLOCK_SIZE + 2, 100])
def test_a_warm_up_times_a_gpu_s_decodes_and_the_quickest_counts(folder: Path, monkeypatch, context_length):
    """The engine computes on a CPU, and takes it for a GPU."""
    engine = build_engine(config(folder, context_length=context_length))
    plans: list[StepPlan] = []

    def seconds(plan: StepPlan) -> float:
        engine.collect(engine.submit(plan))
        plans.append(plan)
        return 1.0 / len(plans)

    monkeypatch.setattr(engine, "_device", torch.device("cuda"))
    monkeypatch.setattr(engine, "_seconds", seconds)
    engine.warm_up()
    (seat,), decodes = plans[0].seats, len(plans) - 1

    assert decodes == min(FEW_DECODES, context_length - 1)
    assert len(seat.tokens) + decodes <= min(context_length, BLOCK_SIZE * len(seat.blocks))
    assert (engine.capacity.decode_s, engine.capacity.token_s) == (1.0 / len(plans), 0.0)


@pytest.mark.skipif(not HAS_GPU, reason="a GPU's steps are timed on a GPU")
@pytest.mark.parametrize("enable_cuda_graphs", [True, False])
def test_a_gpu_has_timed_a_decode_when_it_is_ready(folder: Path, enable_cuda_graphs: bool):
    engine = build_engine(config(folder, device="cuda", enable_cuda_graphs=enable_cuda_graphs))
    hand = Hand(engine)
    hand.seat(0, PROMPT, sampling=SamplingParams(top_p=0.9, seed=0))  # drawn as in the warm-up
    hand.step((0, 0, len(PROMPT), True))
    took = statistics.median(hand.step(decodes=(0,)).step_s or 0.0 for _ in range(20))

    assert took / 5 < engine.capacity.decode_s < 5 * took
    assert engine.capacity.token_s == 0.0


@pytest.mark.skipif(not HAS_GPU, reason="CUDA graphs need a GPU")
def test_graphs_give_the_tokens_of_plain_steps_greedy_and_by_chance(folder: Path, oracle: PreTrainedModel):
    chance = SamplingParams(temperature=1.5, top_p=0.9, seed=4, frequency_penalty=0.5, logprobs=2)
    stories = []
    for enable_cuda_graphs in (True, False):
        engine = build_engine(config(folder, device="cuda", enable_cuda_graphs=enable_cuda_graphs))
        hand = Hand(engine)
        hand.seat(0, PROMPT)
        hand.seat(1, OTHER, sampling=chance)
        hand.seat(3, OTHER + PROMPT)
        whole = tuple((row, 0, length, True) for row, length in ((0, 23), (1, 6), (3, 29)))
        steps = [hand.step(*whole).tokens]
        steps += [hand.step(decodes=rows).tokens for rows in ((0, 1, 3), (3,), (1, 0), (3, 0)) for _ in range(4)]
        hand.seat(2, OTHER, sampling=chance)
        steps += [hand.step((2, 0, 6, True), decodes=(1, 0)).tokens, hand.step(decodes=(0, 2)).tokens]
        stories.append(steps)
    assert stories[0] == stories[1]
    greedy = [tokens[0] for tokens in stories[0][:5]] + [tokens[1] for tokens in stories[0][9:-1]]
    greedy.append(stories[0][-1][0])
    assert greedy == expected(oracle, PROMPT, len(greedy))
