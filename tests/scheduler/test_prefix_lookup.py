from __future__ import annotations

from collections import Counter
from itertools import count

import pytest

from rota.core.config import SchedulerConfig
from rota.core.events import Admitted
from rota.core.policy_config import PolicyConfig
from rota.core.tenant import SOLE_TENANT
from rota.scheduler import prefix
from rota.scheduler.accounts import Account
from rota.scheduler.blocks import BlockLedger
from rota.scheduler.prefix import LOOKS_PER_KEY, MOST_LOOKS, PrefixLookup, extend_keys, findable
from rota.scheduler.sequence import Sequence
from tests.builders import request
from tests.scheduler.stage import Stage, seated

BLOCK = 16
LONG = tuple(range(3, 3 + 400 * BLOCK))  # 400 blocks
MOST_KEYS = MOST_LOOKS // LOOKS_PER_KEY


def stage(blocks: int, rows: int = 8) -> Stage:
    config = SchedulerConfig(chunked_prefill_size=len(LONG) + 8)
    return Stage(
        adapters=0, policy=PolicyConfig(), config=config, blocks=blocks, rows=rows, max_sequence_tokens=2 * len(LONG)
    )


@pytest.fixture
def hashed(monkeypatch) -> Counter[tuple[int, ...]]:
    """How often the block of these tokens was hashed."""
    counts: Counter[tuple[int, ...]] = Counter()
    next_key = prefix.next_key

    def counted(previous, tokens):
        counts[tuple(tokens)] += 1
        return next_key(previous, tokens)

    monkeypatch.setattr(prefix, "next_key", counted)
    return counts


def plan_until_seated(there: Stage, id: str, hashed: Counter[tuple[int, ...]]) -> list[int]:
    """How many names each pass hashed, up to the pass in which the request started."""
    passes = []
    while True:
        before = hashed.total()
        plan = there.scheduler.plan(there.now)
        passes.append(hashed.total() - before)
        there.finish(plan)
        if id in seated(plan):
            return passes


def test_a_prompt_that_was_never_seen_starts_without_more_than_its_first_name(hashed):
    there = stage(blocks=2000)
    there.ask("new", prompt=LONG)

    assert seated(there.scheduler.plan(0.0)) == ["new"]
    assert hashed.total() == 1


def test_a_prompt_is_hashed_while_it_waits_for_a_row(hashed):
    there = stage(blocks=2000, rows=1)
    there.ask("runs", prompt=4, max_new_tokens=20)
    there.ask("waits", prompt=LONG)
    passes = []
    for _ in range(5):
        before = hashed.total()
        there.step()
        passes.append(hashed.total() - before)

    assert max(passes) <= MOST_KEYS + 1
    assert hashed.total() >= len(LONG) // BLOCK - 1


def test_a_long_prompt_that_was_seen_before_is_looked_up_over_several_passes_and_found_whole(hashed):
    there = stage(blocks=2000)
    there.ask("first", prompt=LONG, max_new_tokens=1)
    there.step()
    hashed.clear()
    there.ask("second", prompt=LONG, max_new_tokens=1)
    assert there.scheduler.plan(0.0).wake_at == 0.0, "nothing else runs: the lookup goes on at once"
    assert there.why("second") == "its prompt is still being looked up among the prompts before it"

    passes = plan_until_seated(there, "second", hashed)
    assert len(passes) > 2
    assert max(passes) <= MOST_KEYS
    assert max(hashed.values()) == 1, "each block of a request is hashed once"
    assert there.said(Admitted)[-1].cached_tokens == len(LONG) - BLOCK


def test_short_prompts_start_while_a_long_one_is_looked_up():
    there = stage(blocks=2000)
    there.ask("first", prompt=LONG, max_new_tokens=1)
    there.step()
    there.ask("long", prompt=LONG)
    there.ask("short", prompt=2 * BLOCK)

    assert seated(there.step()) == ["short"]


def test_a_prompt_that_is_refused_is_not_hashed_again(hashed):
    there = stage(blocks=420)
    there.ask("first", prompt=LONG, max_new_tokens=1)
    there.step()
    there.ask("runs", prompt=40 * BLOCK, max_new_tokens=200)
    there.step()
    for number in range(4):
        there.ask(f"waits{number}", prompt=(*LONG[: 300 * BLOCK], *[number] * 100 * BLOCK))
    for _ in range(40):
        there.step()
    for _ in range(10):
        before = hashed.total()
        plan = there.scheduler.plan(there.now)
        assert hashed.total() == before
        there.finish(plan)
    assert there.why("waits0") == "its prompt does not fit into the KV blocks that are free"


@pytest.mark.parametrize("prompts", [8, 32])
def test_a_pass_hashes_no_more_however_many_long_prompts_wait(hashed, prompts):
    there = stage(blocks=2000, rows=64)
    there.ask("first", prompt=LONG, max_new_tokens=1)
    there.step()
    for number in range(prompts):
        there.ask(f"r{number}", prompt=LONG)

    assert max(plan_until_seated(there, f"r{prompts - 1}", hashed)) <= MOST_KEYS + prompts


def test_blocks_that_were_forgotten_while_a_prompt_waits_take_several_passes_too():
    ledger = BlockLedger(MOST_LOOKS, block_size=1)
    waits = Sequence(request(prompt=MOST_LOOKS + 1), MOST_LOOKS + 2, Account(SOLE_TENANT))
    extend_keys(waits, MOST_LOOKS, 1)
    for block, key in zip(ledger.allocate(MOST_LOOKS), waits.block_keys, strict=True):
        ledger.publish(block, key)
    lookup = PrefixLookup(ledger)

    def is_complete() -> bool:
        lookup.begin_pass(step_s=0.0)
        return lookup.is_complete(waits)

    def passes() -> int:
        return next(number for number in count(1) if is_complete())

    assert (passes(), waits.found) == (2, MOST_LOOKS)
    ledger.forget()
    assert (passes(), waits.found) == (2, 0)


@pytest.mark.parametrize(
    ("fields", "scored", "blocks"),
    [
        ({}, None, 3),  # the last token of a prompt of four blocks is computed in any case
        ({"pooling": "last"}, None, 3),
        ({"pooling": "mean"}, None, 0),
        ({"prompt_logprobs": 1}, None, 0),
        # Scored up to a token before a preemption: the token before that one is computed again.
        ({"prompt_logprobs": 1}, 2 * BLOCK, 1),
        ({"prompt_logprobs": 1}, 2 * BLOCK + 1, 2),
        ({"prompt_logprobs": 1}, 4 * BLOCK, 3),
    ],
)
def test_no_block_is_looked_up_whose_states_or_scores_are_wanted(fields, scored, blocks):
    asked = Sequence(request(prompt=4 * BLOCK, **fields), 5 * BLOCK, Account(SOLE_TENANT))
    asked.scored = asked.scored if scored is None else scored

    assert findable(asked, BLOCK) == blocks
