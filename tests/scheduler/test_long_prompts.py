"""Prompts of 100,000 tokens are admitted, computed in chunks, or refused with a sentence that helps."""

from __future__ import annotations

from rota.core.config import SchedulerConfig
from rota.core.events import Finished, FinishReason
from tests.scheduler.stage import Stage

PROMPT = tuple(token % 250 for token in range(100_000))
CHUNK = 2048


def stage(blocks: int, context: int = 131_072) -> Stage:
    config = SchedulerConfig(chunked_prefill_size=CHUNK)
    return Stage(adapters=0, config=config, blocks=blocks, block_size=16, max_sequence_tokens=context)


def test_it_is_computed_in_chunks_and_then_answers():
    there = stage(blocks=6_300)
    there.ask("long", prompt=PROMPT, max_new_tokens=3)
    chunks = [there.step().chunks for _ in range(-(-len(PROMPT) // CHUNK))]
    assert sum(chunk.length for (chunk,) in chunks) == len(PROMPT)
    there.step()
    there.step()
    (ending,) = there.said(Finished)
    assert (ending.reason, ending.prompt_tokens, ending.output_tokens) == (FinishReason.LENGTH, 100_000, 3)


def test_a_short_request_decodes_beside_it_in_every_step():
    there = stage(blocks=6_300)
    there.ask("short", prompt=8, max_new_tokens=20)
    there.step()
    there.ask("long", prompt=PROMPT, max_new_tokens=1)
    for _ in range(10):
        plan = there.step()
        assert (len(plan.decodes), len(plan.chunks)) == (1, 1)
        assert plan.chunks[0].length == CHUNK - 1


def test_it_waits_while_other_requests_hold_the_blocks_that_it_needs():
    there = stage(blocks=6_260)
    there.ask("holds", prompt=PROMPT[:2_000], max_new_tokens=2_000)
    there.step()
    there.ask("long", prompt=PROMPT[::-1], max_new_tokens=1)
    there.step()
    assert there.why("long") == "its prompt does not fit into the KV blocks that are free"


def test_a_cache_that_can_never_hold_it_is_said_with_what_to_change():
    there = stage(blocks=6_000)
    there.ask("long", prompt=PROMPT, max_new_tokens=1)
    there.step()
    (ending,) = there.said(Finished)
    assert ending.fault is not None
    assert ending.fault.message == (
        "The prompt is too long: 100000 tokens > 95999 maximum. This model's maximum context length is 96000 tokens "
        "here, as many as the KV cache holds (mem_fraction_static, kv_blocks), and the answer needs at least one of "
        "them."
    )


def test_a_context_that_is_too_short_is_said_with_its_length():
    there = stage(blocks=6_300, context=65_536)
    there.ask("long", prompt=PROMPT, max_new_tokens=1)
    there.step()
    (ending,) = there.said(Finished)
    assert ending.fault is not None
    assert ending.fault.message == (
        "The prompt is too long: 100000 tokens > 65535 maximum. This model's maximum context length is 65536 tokens, "
        "and the answer needs at least one of them."
    )
