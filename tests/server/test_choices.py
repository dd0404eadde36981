"""Deltas of a choice become one, and leave nothing for the garbage collector to visit."""

from __future__ import annotations

import gc

from rota.core.events import Finished, FinishReason
from rota.core.ids import RequestId
from rota.server.answers.answer import Gathered
from rota.server.streams import Delta
from rota.text.parsed_delta import CallPiece, ParsedDelta

ENDING = Finished(request_id=RequestId("a"), at=0.0, reason=FinishReason.STOP, embedding=(0.5,))
DELTAS = [
    Delta(0, [1], said=ParsedDelta("Once", "So")),
    Delta(0),
    Delta(0, [2, 3], said=ParsedDelta(" upon", calls=(CallPiece(index=0, name="f"),))),
    Delta(0, [4], said=ParsedDelta(" a time", "."), finish_reason="stop", ending=ENDING),
]


def gathered(deltas: list[Delta]) -> Delta:
    all_of_them = Gathered(0)
    for delta in deltas:
        all_of_them.add(delta)
    return all_of_them.whole


def test_deltas_are_joined_in_their_order_and_the_last_says_how_it_ends():
    said = ParsedDelta("Once upon a time", "So.", (CallPiece(index=0, name="f"),))
    assert gathered(DELTAS) == Delta(0, [1, 2, 3, 4], said=said, finish_reason="stop", ending=ENDING)
    assert gathered(DELTAS[:1]) == DELTAS[0]
    assert DELTAS[0].tokens == [1], "a delta belongs to its client"


def test_what_is_gathered_is_as_few_objects_for_a_long_answer_as_for_a_short_one():
    gathered = Gathered(0)
    gathered.add(Delta(0, [0], said=ParsedDelta("word")))
    gc.collect()
    before = len(gc.get_objects())
    for token in range(5000):
        gathered.add(Delta(0, [token], said=ParsedDelta("word")))
    gc.collect()

    assert len(gc.get_objects()) < before + 1000
    assert len(gathered.whole.tokens) == 5001
