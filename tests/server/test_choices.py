"""Chunks of a choice become one, and leave nothing for the garbage collector to visit."""

from __future__ import annotations

import gc

from rota.server.answers.answer import AnswerChunk, Gathered, joined

CHUNKS = [
    AnswerChunk("Once", [1], scores=[]),
    AnswerChunk(""),
    AnswerChunk(" upon", [2, 3]),
    AnswerChunk(" a time", [4], finish_reason="stop", embedding=(0.5,)),
]


def test_chunks_are_joined_in_their_order_and_the_last_says_how_it_ends():
    assert joined(CHUNKS) == AnswerChunk("Once upon a time", [1, 2, 3, 4], finish_reason="stop", embedding=(0.5,))
    assert joined(CHUNKS[:1]) == CHUNKS[0]
    assert CHUNKS[0].tokens == [1], "a chunk belongs to its client"


def test_what_is_gathered_is_as_few_objects_for_a_long_answer_as_for_a_short_one():
    gathered = Gathered(AnswerChunk("word", [0]))
    gc.collect()
    before = len(gc.get_objects())
    for token in range(5000):
        gathered.add(AnswerChunk("word", [token]))
    gc.collect()

    assert len(gc.get_objects()) < before + 1000
    assert len(gathered.chunk.tokens) == 5001
