"""A step in a frame, padded for a graph, gives the tokens of the same step without one; graphs are captured by need."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from rota.core.capacity import Capacity
from rota.core.ids import Row
from rota.core.plan import Chunk, StepPlan, StepResult
from rota.core.request import SamplingParams
from rota.engine.engine import Engine
from rota.engine.families.decoder import Kernels
from rota.engine.families.table import make_model, read_spec
from rota.engine.kv_cache import CacheShape, KVCache
from rota.engine.lora.adapters import Adapters
from rota.engine.lora.bank import Bank
from rota.engine.lora.loader import checkpoint_reader
from rota.engine.lora.reference import project_with_lora
from rota.engine.ops.reference import Operations
from rota.engine.step import graphs
from rota.engine.step.frames import (
    DECODE_STEP,
    MOST_CHUNKS,
    PromptRoom,
    StepFrame,
    decode_frames,
    layout_of,
    mixed_frame,
    mixed_frames,
)
from rota.engine.step.graphs import LARGE, WANTED_IF_LARGE, WANTED_OFTEN, GraphCapture, Kind, StepGraph, StepGraphs
from rota.engine.step.results import Computed
from rota.engine.weights.load import load_weights
from tests.engine.hand import BLOCK_SIZE, BLOCKS, OTHER, PROMPT, ROWS, Hand, expected, no_graph
from tests.engine.model_factory import make_tiny_model
from tests.engine.triton_interpreter import DEVICE, load

MIXED = mixed_frame(decodes=ROWS, prompt_tokens=32)


class ComputedGraphs(StepGraphs):
    """Graphs whose replay computes the step anew: what needs no GPU to be wrong."""

    def __init__(self, engine: Engine) -> None:
        super().__init__([(StepFrame(ROWS, page_changes=ROWS), False), (MIXED, False)], no_graph)
        while self.capture_next():
            pass
        self._engine = engine
        self.replayed = 0

    def replay(self, inputs: NDArray[np.int32], frame: StepFrame, has_adapters: bool) -> Computed:
        self.replayed += 1
        sent = torch.from_numpy(inputs).to(DEVICE)
        return self._engine._computation.compute(sent, frame, has_adapters)


class FramedHand(Hand):
    """Computes every step in a frame, as a graph would."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        engine._computation.graphs = self._graphs = ComputedGraphs(engine)

    def step(self, *chunks: tuple[int, int, int, bool], decodes: tuple[int, ...] = ()) -> StepResult:
        before = self._graphs.replayed
        result = super().step(*chunks, decodes=decodes)
        assert self._graphs.replayed == before + 1
        return result


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """The interpreter takes as long as there are layers and heads."""
    folder = tmp_path_factory.mktemp("model")
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return folder, make_tiny_model(folder, "llama3", **small)


@pytest.fixture(scope="module")
def folder(made: tuple[Path, PreTrainedModel]) -> Path:
    return made[0]


@pytest.fixture(scope="module")
def oracle(made: tuple[Path, PreTrainedModel]) -> PreTrainedModel:
    return made[1]


@pytest.fixture
def engine(folder: Path) -> Engine:
    return make_engine(folder)


def make_engine(folder: Path) -> Engine:
    """Its attention is the one that graphs use: it asks nothing on the host."""
    device, attention = torch.device(DEVICE), load("rota.engine.attention.triton_attention")
    spec = read_spec(folder)
    weights = load_weights(folder, spec, device, torch.float32, quiet=True)
    bank = Bank(spec, 1, 8, torch.float32, device)
    adapters = Adapters(bank, checkpoint_reader(bank, spec), project_with_lora, rows=ROWS, overlaps=True)
    kernels = Kernels(Operations(), attention.TritonAttention(spec.attention_scale), adapters.project)
    shape = CacheShape(spec.layers, spec.kv_heads, spec.head_dim, BLOCK_SIZE, torch.float32)
    return Engine(
        make_model(spec, weights, kernels),
        spec,
        KVCache(BLOCKS, shape, device),
        Capacity(blocks=BLOCKS, block_size=BLOCK_SIZE, rows=ROWS, max_sequence_tokens=256),
        adapters,
    )


def test_decodes_and_chunks_beside_each_other_give_the_tokens_of_transformers(engine: Engine, oracle):
    hand = FramedHand(engine)
    hand.seat(2, PROMPT)
    answer = [*hand.step((2, 0, len(PROMPT), True)).tokens]
    hand.seat(0, OTHER)
    hand.seat(3, PROMPT + OTHER)
    token, other = hand.step((0, 0, len(OTHER), True), (3, 0, 20, False), decodes=(2,)).tokens
    second, third = hand.step((3, 20, 9, True), decodes=(2,)).tokens
    after = [hand.step(decodes=(3, 0, 2)).tokens for _ in range(3)]

    assert [*answer, token, second, *(tokens[2] for tokens in after)] == expected(oracle, PROMPT, 6)
    assert [other, *(tokens[1] for tokens in after)] == expected(oracle, OTHER, 4)
    assert [third, *(tokens[0] for tokens in after)] == expected(oracle, PROMPT + OTHER, 4)


def test_whoever_wants_more_than_the_likeliest_token_gets_in_a_frame_what_it_gets_without(folder: Path):
    """Rows out of order, padding between decodes and chunks, a chunk that gives no token, and one that is all."""

    def answers(hand: Hand) -> list[StepResult]:
        hand.seat(3, PROMPT, sampling=SamplingParams(temperature=0.9, top_p=0.8, seed=5, logprobs=2))
        results = [hand.step((3, 0, 9, False)), hand.step((3, 9, len(PROMPT) - 9, True))]
        hand.seat(0, OTHER, sampling=SamplingParams(temperature=1.1, seed=7, presence_penalty=1.5))
        hand.seat(2, PROMPT + OTHER)
        hand.seat(1, PROMPT[:5], sampling=SamplingParams(temperature=0.0, logprobs=0))
        results.append(hand.step((2, 0, 12, False), (0, 0, len(OTHER), True), (1, 0, 5, True), decodes=(3,)))
        results.append(hand.step((2, 12, len(PROMPT + OTHER) - 12, True), decodes=(1, 3, 0)))
        return [*results, *(hand.step(decodes=(2, 0, 3, 1)) for _ in range(2))]

    framed, plain = answers(FramedHand(make_engine(folder))), answers(Hand(make_engine(folder)))

    assert [result.tokens for result in framed] == [result.tokens for result in plain]
    for ours, theirs in zip(framed, plain, strict=True):
        assert [at for at, _ in ours.logprobs] == [at for at, _ in theirs.logprobs]
        chosen = [[one.chosen for _, one in result.logprobs] for result in (ours, theirs)]
        assert chosen[0] == pytest.approx(chosen[1], abs=1e-4)


def test_a_frame_holds_what_fits_into_it():
    chunk = Chunk(row=Row(0), start=0, length=16, samples=True)
    assert MIXED.holds(StepPlan(step_id=1, chunks=(chunk, chunk)))
    assert not MIXED.holds(StepPlan(step_id=1, chunks=(chunk, chunk, chunk)))
    assert not MIXED.holds(
        StepPlan(step_id=1, chunks=(Chunk(row=Row(0), start=0, length=1, samples=True),) * (MOST_CHUNKS + 1))
    )
    assert not MIXED.holds(StepPlan(step_id=1, chunks=(chunk,), decodes=tuple(map(Row, range(ROWS + 1)))))


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (20, [1, 2, 4, 8, 16, 20]), (96, [1, 2, 4, *range(8, 65, 8), 80, 96])],
)
def test_graph_sizes_are_dense_where_steps_are_small_and_reach_every_row(rows: int, sizes: list[int]):
    assert [frame.decodes for frame in decode_frames(rows)] == sizes


@pytest.mark.parametrize(("rows", "budget"), [(4, 32), (48, 500), (256, 1024)])
def test_frames_reach_every_row_and_the_largest_step_and_come_smallest_first(rows: int, budget: int):
    frames = mixed_frames(rows, PromptRoom(budget))
    sizes = [frame.tokens for frame in frames]
    assert sizes == sorted(sizes)
    assert mixed_frame(rows, budget) in frames
    assert max(frame.prompt_tokens for frame in frames) == budget


def test_a_step_with_a_prompt_is_padded_by_fewer_than_32_decodes():
    frames = mixed_frames(256, PromptRoom(2048))
    for decodes in range(1, 257):
        room = min(frame.decodes for frame in frames if frame.decodes >= decodes)
        assert room - decodes < 32


def test_without_adapters_long_prompts_go_without_a_graph():
    assert max(frame.prompt_tokens for frame in mixed_frames(256, PromptRoom(2048), has_adapters=False)) == 512
    assert max(frame.prompt_tokens for frame in mixed_frames(256, PromptRoom(2048), has_adapters=True)) == 1024


@pytest.mark.parametrize(("rows", "budget"), [(100, 500), (256, 1024), (384, 2048), (1024, 512)])
@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_full_step_of_a_light_model_is_not_padded_beyond_its_budget(rows: int, budget: int, has_adapters: bool):
    frames = mixed_frames(rows, PromptRoom(budget, is_light=True), has_adapters)
    for decodes in both_sides_of_steps(min(rows, budget - DECODE_STEP)):
        counted = -(-decodes // DECODE_STEP) * DECODE_STEP  # as the scheduler counts them
        room = next(frame for frame in frames if frame.holds(_step(decodes, budget - counted)))
        assert room.tokens <= budget


@pytest.mark.parametrize("prompt_tokens", [1, 700, 1300, 2047, 2048])
def test_every_step_of_a_light_model_has_a_frame(prompt_tokens: int):
    frames = mixed_frames(384, PromptRoom(2048, is_light=True), has_adapters=False)
    for decodes in (0, *both_sides_of_steps(min(384, 2048 - prompt_tokens))):
        assert any(frame.holds(_step(decodes, prompt_tokens)) for frame in frames)


def both_sides_of_steps(most: int) -> list[int]:
    """All decodes between them find the same frames."""
    return sorted({most, *range(1, most + 1, DECODE_STEP), *range(DECODE_STEP, most + 1, DECODE_STEP)})


def _step(decodes: int, prompt_tokens: int) -> StepPlan:
    chunk = Chunk(row=Row(0), start=0, length=prompt_tokens, samples=True)
    return StepPlan(step_id=1, chunks=(chunk,), decodes=tuple(map(Row, range(decodes))))


def test_precompiling_computes_a_step_in_every_frame_and_leaves_the_cache_to_others(engine: Engine, oracle):
    engine.precompile(PromptRoom(32))
    hand = FramedHand(engine)
    hand.seat(1, PROMPT)
    assert [*hand.step((1, 0, len(PROMPT), True)).tokens, *hand.decode(1, 3)] == expected(oracle, PROMPT, 4)


# Capturing, with CUDA's part played by nobody: what a graph reads and writes is settled then.

FRAMES = [StepFrame(1, page_changes=1), StepFrame(4, page_changes=4), mixed_frame(1, 32), mixed_frame(4, 8)]
KINDS = [(frame, has_adapters) for frame in FRAMES for has_adapters in (False, True)]


def sampled(frame: StepFrame) -> int:
    return frame.decodes + frame.sampled


def test_all_graphs_write_their_logits_to_the_same_place_whatever_they_hold(monkeypatch):
    """The largest step is captured first, and need not be the one that samples for most."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(graphs, "recorded", lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    logits = torch.zeros(4 + MOST_CHUNKS, 7)

    def body(_inputs: Tensor, frame: StepFrame, _has_adapters: bool, logits: Tensor) -> Computed:
        rows = torch.zeros(sampled(frame))
        return Computed(rows, logits[: sampled(frame)], rows, rows, hidden=torch.zeros(frame.tokens, 3))

    def padding(frame: StepFrame, _has_adapters: bool) -> np.ndarray:
        return np.zeros(layout_of(frame).numbers, np.int32)

    capture = GraphCapture(body, padding, logits)
    for frame, has_adapters in KINDS:
        computed = capture(frame, has_adapters).computed
        assert computed.logits.data_ptr() == logits.data_ptr()
        assert computed.logits.shape == (sampled(frame), 7)
        assert computed.hidden is None


class Captures:
    """Notes what is captured."""

    def __init__(self) -> None:
        self.kinds: list[Kind] = []

    def __call__(self, frame: StepFrame, has_adapters: bool) -> StepGraph:
        self.kinds.append((frame, has_adapters))
        return cast(StepGraph, object())


def decodes(count: int) -> StepPlan:
    return StepPlan(step_id=0, decodes=tuple(map(Row, range(count))))


def test_when_idle_graphs_are_captured_one_by_one_until_all_are_there():
    captures = Captures()
    graphs = StepGraphs(KINDS, captures)
    rounds = 1
    while graphs.capture_next():
        rounds += 1
    assert (rounds, captures.kinds) == (len(KINDS), KINDS)
    assert not graphs.capture_next()
    assert captures.kinds == KINDS


def test_a_step_takes_the_smallest_frame_that_is_there():
    graphs = StepGraphs(KINDS, Captures())
    assert graphs.frame_for(decodes(1), has_adapters=False) is None
    graphs.capture((FRAMES[1], False))
    assert graphs.frame_for(decodes(1), has_adapters=False) is FRAMES[1]
    assert graphs.frame_for(decodes(1), has_adapters=True) is None
    assert graphs.frame_for(decodes(5), has_adapters=False) is None


def test_graphs_that_read_memory_of_before_are_captured_anew():
    captures = Captures()
    graphs = StepGraphs(KINDS, captures)
    while graphs.capture_next():
        pass
    plan = StepPlan(step_id=0, decodes=(Row(0),))

    graphs.forget(has_adapters=True)

    assert graphs.frame_for(plan, has_adapters=False) == FRAMES[0]
    assert graphs.frame_for(plan, has_adapters=True) is None
    while graphs.capture_next():
        pass
    assert captures.kinds[len(KINDS) :] == [kind for kind in KINDS if kind[1]]
    assert graphs.frame_for(plan, has_adapters=True) == FRAMES[0]


def test_a_graph_that_is_wanted_often_is_captured_though_nothing_is_ever_idle():
    captures = Captures()
    graphs = StepGraphs(KINDS, captures)
    found = [graphs.frame_for(decodes(3), has_adapters=True) for _ in range(WANTED_OFTEN + 2)]
    assert found == [None] * (WANTED_OFTEN - 1) + [FRAMES[1]] * 3
    assert captures.kinds == [(FRAMES[1], True)]


def test_a_large_graph_is_captured_sooner():
    large = mixed_frame(decodes=4, prompt_tokens=LARGE + 1)
    graphs = StepGraphs([(large, False)], Captures())
    chunk = Chunk(row=Row(0), start=0, length=LARGE, samples=True)
    plan = StepPlan(step_id=0, chunks=(chunk,))
    found = [graphs.frame_for(plan, has_adapters=False) for _ in range(WANTED_IF_LARGE)]
    assert found == [None] * (WANTED_IF_LARGE - 1) + [large]
