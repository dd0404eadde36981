"""Ranks that each know some logits choose the token that one rank would choose, and give all logits where asked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rota.core.plan import NO_TOKEN
from rota.engine.parallel.group import RankGroup
from rota.engine.parallel.shard import Shard
from rota.engine.sampling.vocabulary import RankVocabulary
from tests.engine.parallel.together import together


def own(logits: Tensor, group: RankGroup) -> tuple[RankVocabulary, Tensor]:
    shard = Shard(group.rank, group.size)
    cut = shard.tokens(logits.shape[1])
    return RankVocabulary(logits.shape[1], group, shard), logits[:, cut.first : cut.end]


def greedy(logits: Tensor, size: int) -> list[tuple[list[int], list[int]]]:
    def part(group: RankGroup) -> tuple[list[int], list[int]]:
        vocabulary, share = own(logits, group)
        tokens, masked = vocabulary.greedy(share)
        return tokens.tolist(), masked.tolist()

    return together(size, part)


# Few different numbers, so that many are equal; and some that are none.
NUMBERS = st.sampled_from([0.0, -1.0, 1.0, 2.0, 2.0, float("nan"), float("inf"), float("-inf")])


@settings(deadline=None)
@given(st.sampled_from([2, 3, 4]), st.integers(16, 40), st.data())
def test_the_first_of_the_largest_is_chosen_and_what_is_no_number_gives_no_token(size, vocabulary, data):
    rows = data.draw(st.lists(st.lists(NUMBERS, min_size=vocabulary, max_size=vocabulary), min_size=1, max_size=3))
    logits = torch.tensor(rows)
    right = [part.tolist() for part in RankVocabulary(vocabulary).greedy(logits)]

    for tokens, masked in greedy(logits, size):
        assert masked == right[1]
        assert min(tokens) >= 0  # the next step embeds it, also where the answer ends
        assert [a == b or c == NO_TOKEN for a, b, c in zip(tokens, right[0], masked, strict=True)] == [True] * len(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_token_of_a_large_vocabulary_is_not_rounded(dtype):
    logits = torch.zeros(2, 262_144, dtype=dtype)
    logits[0, -1] = logits[1, -2] = 1.0

    assert greedy(logits, 3) == [([262_143, 262_142],) * 2] * 3


@pytest.mark.parametrize("vocabulary", [256, 257, 1000])
def test_all_logits_are_in_order_whatever_the_last_rank_s_share(vocabulary):
    logits = torch.randn(3, vocabulary)

    def part(group: RankGroup) -> Tensor:
        ranks, share = own(logits, group)
        return ranks.whole(share)

    for whole in together(3, part):
        assert torch.equal(whole, logits)
