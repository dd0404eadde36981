"""Every row gets its token as its request asked, whoever sits beside it and however often it changed its seat."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from rota.core.ids import BASE, RequestId, Row
from rota.core.plan import Seat
from rota.core.request import SamplingParams
from rota.engine.sampling.sampler import Sampler
from rota.engine.step.results import Sampled

VOCABULARY = 64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def same_dice() -> None:
    torch.manual_seed(0)


def seat(row: int, tokens: tuple[int, ...] = (1, 2, 3), prompt_length: int = 3, **sampling: Any) -> Seat:
    params = SamplingParams.from_fields({"seed": 0, **sampling})
    return Seat(
        request_id=RequestId(f"r{row}"),
        row=Row(row),
        adapter_id=BASE,
        tokens=tokens,
        prompt_length=prompt_length,
        blocks=(),
        sampling=params,
    )


def sampler(*seats: Seat) -> Sampler:
    made = Sampler(8, VOCABULARY, DEVICE)
    made.seat(seats)
    return made


def sample(of: Sampler, logits: Tensor, rows: list[int], indices: list[int] | int = 3) -> Sampled:
    where = [indices] * len(rows) if isinstance(indices, int) else indices
    host_rows = np.array(rows)
    on_device = (torch.tensor(rows, dtype=torch.int32), torch.tensor(where, dtype=torch.int32))
    before = logits.clone()
    logits = logits.to(DEVICE)
    sampled = of.sample(logits, *(each.to(DEVICE) for each in on_device), host_rows)
    assert torch.equal(logits.cpu(), before), "the logits belong to somebody else"
    return sampled


def tokens(of: Sampler, logits: Tensor, rows: list[int], indices: list[int] | int = 3) -> list[int]:
    return sample(of, logits, rows, indices).tokens.tolist()


def story(of: Sampler, row: int, logits: Tensor, steps: int = 12) -> list[int]:
    """What one row draws, step after step, from the same logits."""
    return [tokens(of, logits, [row], index)[0] for index in range(3, 3 + steps)]


def test_greedy_rows_take_the_best_token():
    logits = torch.randn(3, VOCABULARY)
    of = sampler(*(seat(row, temperature=0.0) for row in range(3)))
    assert of.needs(np.array([0, 1, 2])) == 0
    assert tokens(of, logits, [2, 0, 1]) == logits.argmax(-1).tolist()


def test_rows_of_all_kinds_share_a_step():
    logits = torch.randn(4, VOCABULARY)
    of = sampler(
        seat(0, temperature=0.0),
        seat(1, top_k=1),
        seat(2, temperature=5.0, seed=1),
        seat(3, temperature=0.0, presence_penalty=2.0),
    )
    found = tokens(of, logits, [0, 1, 2, 3])
    assert found[:2] == logits[:2].argmax(-1).tolist()
    assert found[3] == int(logits[3].argmax())  # nothing written yet: nothing to be penalised
    assert found[2] == tokens(of, logits[2:3], [2])[0]


def test_a_seed_repeats_and_another_seed_does_not():
    logits = torch.randn(1, VOCABULARY)
    first = story(sampler(seat(0, seed=11)), 0, logits)
    assert story(sampler(seat(5, seed=11)), 5, logits) == first
    assert story(sampler(seat(0, seed=12)), 0, logits) != first


def test_the_sampler_draws_no_seed_of_its_own():
    with pytest.raises(AssertionError, match="is given its seed where the request is made"):
        sampler(seat(0, seed=None))
    sampler(seat(0, seed=None, temperature=0.0))


def test_neighbours_do_not_change_what_a_row_draws():
    logits = torch.randn(4, VOCABULARY)
    of = sampler(
        seat(0, seed=5, temperature=1.3), seat(1, top_p=0.3), seat(2, repetition_penalty=1.5), seat(3, temperature=0.0)
    )
    alone = [tokens(of, logits[:1], [0], index)[0] for index in range(30)]
    among = [tokens(of, logits[[3, 0, 1, 2]], [3, 0, 1, 2], [9, index, 4, 7])[1] for index in range(30)]
    assert among == alone


def test_the_temperature_sharpens_and_flattens_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0]).repeat(4000, 1)
    for temperature in (0.5, 2.0):
        of = Sampler(4000, 3, DEVICE)
        of.seat([seat(row, temperature=temperature, seed=row) for row in range(4000)])
        found = torch.tensor(tokens(of, logits, list(range(4000))))
        shares = torch.bincount(found, minlength=3) / 4000
        assert torch.allclose(shares, torch.softmax(logits[0] / temperature, -1), atol=0.025)


def test_filtered_tokens_are_never_drawn():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0] + [-5.0] * 59])
    assert set(story(sampler(seat(0, top_k=2, temperature=9.0, seed=0)), 0, logits, 60)) == {3, 4}
    assert set(story(sampler(seat(0, top_p=0.8, seed=0)), 0, logits, 60)) == {3, 4}
    assert set(story(sampler(seat(0, min_p=0.1, seed=0)), 0, logits, 60)) == {2, 3, 4}


def test_a_top_k_beyond_the_vocabulary_filters_nothing():
    logits = torch.zeros(1, VOCABULARY)
    assert story(sampler(seat(0, top_k=10**9, seed=3)), 0, logits) == story(sampler(seat(0, seed=3)), 0, logits)


def test_the_repetition_penalty_is_that_of_transformers_over_prompt_and_output():
    logits = torch.randn(1, VOCABULARY) * 4.0
    known = (*logits[0].topk(6).indices.tolist(), 1, 2)
    expected = RepetitionPenaltyLogitsProcessor(3.0)(torch.tensor([known]), logits.clone())
    of = sampler(seat(4, known, prompt_length=5, temperature=0.0, repetition_penalty=3.0))
    assert tokens(of, logits, [4]) == expected.argmax(-1).tolist()
    assert tokens(of, logits, [4]) != logits.argmax(-1).tolist()


def test_presence_and_frequency_count_what_was_written_and_not_the_prompt():
    logits = torch.full((1, VOCABULARY), -9.0)
    logits[0, 10], logits[0, 11], logits[0, 12] = 3.0, 2.8, 2.1
    # 10 is in the prompt and costs nothing; written it costs 0.5, and 0.25 a time.
    of = sampler(seat(0, (10,), 1, temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25))
    assert story(of, 0, logits, 5) == [10, 11, 10, 12, 11]


def test_a_preempted_sequence_is_penalised_as_if_nothing_had_happened():
    logits = torch.randn(1, VOCABULARY)
    asked = {"seed": 9, "repetition_penalty": 1.7, "frequency_penalty": 0.9, "presence_penalty": 0.3}
    whole = story(sampler(seat(0, **asked)), 0, logits, 12)

    again = sampler(seat(0, **asked))
    begun = story(again, 0, logits, 6)
    again.seat([seat(3, (1, 2, 3, *begun), prompt_length=3, **asked)])
    rest = [tokens(again, logits, [3], index)[0] for index in range(9, 15)]
    assert begun + rest == whole


def test_who_sits_down_inherits_nothing():
    logits = torch.randn(2, VOCABULARY)
    of = sampler(seat(0, temperature=0.0, presence_penalty=2.0), seat(1, temperature=0.0, presence_penalty=2.0))
    story(of, 0, logits[:1], 5)
    of.seat([seat(0, temperature=0.0)])
    assert tokens(of, logits, [0, 1])[0] == int(logits[0].argmax())
    of.seat([seat(0, temperature=0.0, presence_penalty=2.0)])
    assert tokens(of, logits[:1], [0])[0] == int(logits[0].argmax())


def test_logprobs_are_those_of_the_untouched_distribution():
    logits = torch.randn(3, VOCABULARY) * 2.0
    of = sampler(
        seat(0, temperature=0.0),
        seat(1, temperature=0.3, top_k=4, repetition_penalty=2.0, logprobs=5),
        seat(2, temperature=0.0, logprobs=0),
    )
    sampled = sample(of, logits, [0, 1, 2])
    expected = logits.log_softmax(-1)
    assert sampled.logprobs is not None
    assert sampled.logprobs.wanted == ((1, 5), (2, 0))
    chosen = expected.gather(1, sampled.tokens.cpu()[:, None])[:, 0]
    assert torch.allclose(sampled.logprobs.chosen.cpu(), chosen, atol=1e-5)
    top = expected[1].topk(5)
    assert sampled.logprobs.top_tokens[1].tolist() == top.indices.tolist()
    assert torch.allclose(sampled.logprobs.top[1].cpu(), top.values, atol=1e-5)


def test_nobody_s_logprobs_are_computed_if_nobody_asked():
    assert sample(sampler(seat(0)), torch.randn(1, VOCABULARY), [0]).logprobs is None
