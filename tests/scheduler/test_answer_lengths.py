"""How long an answer becomes is guessed from answers before it, and never only from the limit that its client asked."""

from __future__ import annotations

import pytest

from rota.core.ids import AdapterId
from rota.core.tenant import Tenant
from rota.scheduler.accounts import Account
from rota.scheduler.adapter_state import (
    FEW_LENGTHS,
    LEAST_GUESS,
    LEAST_REST,
    REMEMBERED,
    TELLING_LENGTHS,
    AnswerLengths,
    Group,
)
from rota.scheduler.sequence import Phase, Sequence
from tests.builders import add_adapter, request

LIMIT = 4096
ACCOUNT = Account(Tenant(name="a"))


def lengths(*found: int) -> AnswerLengths:
    remembered = AnswerLengths()
    for one in found:
        remembered.append(one)
    return remembered


def group(own: AnswerLengths, pooled: AnswerLengths) -> Group:
    made = Group(add_adapter(1).adapter, pooled)
    made.lengths = own
    return made


def sequence(done: int = 0, limit: int = LIMIT, at: float = 0.0, id: str = "r") -> Sequence:
    asked = request(id, adapter=AdapterId(1), prompt=5, max_new_tokens=limit, arrived_at=at)
    made = Sequence(asked, 5 + limit, ACCOUNT)
    made.tokens.extend([7] * done)
    return made


@pytest.mark.parametrize(
    ("own", "pooled", "done", "expected"),
    [
        ([], [], 0, LEAST_GUESS),  # nothing is known
        ([], [], 300, 300),  # as much again
        ([], [100], 0, 100),
        ([200] * (FEW_LENGTHS - 1), [100], 0, 100),  # too few of its own: those of all adapters
        ([200] * FEW_LENGTHS, [100], 0, 200),
        ([10, 20, 90, 110], [50], 20, 80),  # the mean of the answers that became longer
        ([200] * FEW_LENGTHS, [100, 400], 300, 100),  # longer than its own: those of all adapters
        ([200] * FEW_LENGTHS, [100], 300, 300),  # longer than any: as much again
        ([9000] * FEW_LENGTHS, [], 0, LIMIT),
    ],
)
def test_what_is_still_expected_of_an_answer(own, pooled, done, expected):
    assert group(lengths(*own), lengths(*pooled)).expected_tokens(sequence(done)) == expected


@pytest.mark.parametrize(
    ("own", "pooled", "done", "most"),
    [
        ([], [], 0, 2 * LEAST_GUESS),
        ([500] * (TELLING_LENGTHS - 1), [70] * TELLING_LENGTHS, 10, 60),
        ([500] * TELLING_LENGTHS, [70] * TELLING_LENGTHS, 10, 490),
        ([500] * TELLING_LENGTHS, [], 600, 600),  # as much again
        ([9000] * TELLING_LENGTHS, [], 0, LIMIT),
    ],
)
def test_the_most_that_may_come_of_an_answer(own, pooled, done, most):
    assert group(lengths(*own), lengths(*pooled)).most_tokens(sequence(done)) == most


def test_only_the_last_answers_count():
    found = lengths(*[1000] * REMEMBERED, *[10] * REMEMBERED)
    assert (found.longest, found.mean_above(0), found.mean_above(10)) == (10, 10, None)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"at": 0.0}, {"at": 5.0}),  # the older request
        ({"limit": 50}, {"limit": 400}),  # the one that needs fewer tokens more
        ({"limit": 400, "at": 0.0}, {"limit": 50, "at": 6.0}),  # long, but old
    ],
)
def test_the_older_and_the_shorter_request_has_the_larger_claim(first, second):
    claims = []
    for one in (first, second):
        made = group(AnswerLengths(), AnswerLengths())
        made.enter(ACCOUNT)
        made.join(sequence(**one), Phase.DECODE)
        claims.append(made.claim(now=10.0))
    assert claims[0] > claims[1]


@pytest.mark.parametrize("phases", [[Phase.DECODE, Phase.DECODE], [Phase.PREFILL, Phase.DECODE]])
def test_a_claim_counts_every_request_and_the_tokens_that_the_first_of_each_kind_needs(phases):
    """Nine requests of four tokens count as one of sixteen does, nine times; one more that needs 32 halves that."""
    one, nine, ten = (group(AnswerLengths(), AnswerLengths()) for _ in "abc")
    for made, limits in ((one, [LEAST_REST]), (nine, [4] * 9), (ten, [2 * LEAST_REST, *[4] * 8])):
        made.enter(ACCOUNT)
        for number, limit in enumerate(limits):
            made.join(sequence(limit=limit, id=f"r{number}"), phases[number > 0])
    assert nine.claim(now=1.0) == pytest.approx(9 * one.claim(now=1.0))
    assert ten.claim(now=1.0) == pytest.approx(4.5 * one.claim(now=1.0))
