"""Blocks that have left the window of every layer are given back, and prefixes are found as before."""

from __future__ import annotations

import pytest

from rota.core.config import SchedulerConfig
from rota.core.events import Admitted, Finished, Preempted
from tests.scheduler.stage import Stage

BLOCK = 16


def held(stage: Stage) -> int:
    blocks = stage.scheduler._state.blocks
    return blocks.total - blocks.free


def test_a_long_answer_holds_no_more_than_its_window_and_the_block_that_it_leaves():
    stage = Stage(adapters=0, window=3 * BLOCK)
    stage.ask("long", prompt=BLOCK, max_new_tokens=20 * BLOCK)
    most = 0
    for _ in range(20 * BLOCK):
        stage.step()
        most = max(most, held(stage))
    assert most == 3 + 1
    assert stage.said(Finished)[0].output_tokens == 20 * BLOCK
    assert held(stage) == 0


def test_answers_that_together_are_longer_than_all_blocks_are_not_preempted():
    stage = Stage(adapters=0, window=2 * BLOCK, blocks=16)
    for number in range(4):
        stage.ask(f"r{number}", prompt=1, max_new_tokens=10 * BLOCK)
    for _ in range(10 * BLOCK):
        stage.step()
    assert [one.output_tokens for one in stage.said(Finished)] == [10 * BLOCK] * 4
    assert stage.said(Preempted) == []


def test_blocks_of_a_prompt_are_given_back_chunk_by_chunk():
    stage = Stage(adapters=0, window=BLOCK, config=SchedulerConfig(chunked_prefill_size=4 * BLOCK))
    stage.ask("prompt", prompt=12 * BLOCK, max_new_tokens=2)
    stage.step()
    assert held(stage) == 12 - 3
    stage.step()
    assert held(stage) == 12 - 7


@pytest.mark.parametrize(("prompt", "blocks"), [(2 * BLOCK - 2, 2), (2 * BLOCK - 1, 1)])
def test_a_block_is_held_as_long_as_the_next_token_sees_one_of_its_tokens(prompt, blocks):
    """The next token is in its own window too."""
    stage = Stage(adapters=0, window=BLOCK)
    stage.ask("long", prompt=prompt, max_new_tokens=9)
    stage.step()
    assert held(stage) == blocks


def test_a_prefix_is_found_again_although_its_blocks_were_given_back():
    prompt = tuple(range(8 * BLOCK))
    stage = Stage(adapters=0, window=2 * BLOCK)
    for id in ("first", "second"):
        stage.ask(id, prompt=prompt, max_new_tokens=1)
        stage.step()
    assert [one.cached_tokens for one in stage.said(Admitted)] == [0, 7 * BLOCK]


def test_without_a_cache_of_prefixes_blocks_are_given_back_too():
    stage = Stage(adapters=0, window=BLOCK, config=SchedulerConfig(enable_prefix_caching=False))
    stage.ask("long", prompt=1, max_new_tokens=10 * BLOCK)
    for _ in range(8 * BLOCK):
        stage.step()
    assert held(stage) <= 3
