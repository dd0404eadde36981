"""What a request says of tokens holds for its own row: masks, biases, limits, and every field as a plain model says."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rota.core.grammar import Grammar
from rota.core.ids import BASE, RequestId, Row
from rota.core.plan import NO_CHOICE, Seat
from rota.core.request import SamplingParams
from rota.engine.sampling.draw import keep_top_sigmas
from rota.engine.sampling.guides import BadWords, Guides
from rota.engine.sampling.masks import Masks, RowMasks, mask_logits, packed
from rota.engine.sampling.restrictions import Biases, add_biases
from rota.engine.sampling.sampler import Sampler
from tests.engine.eager_story import build
from tests.engine.fake_grammars import FakeGrammars, masks_of, obeys
from tests.engine.guided_story import in_flight
from tests.engine.model_factory import make_tiny_model
from tests.engine.row_story import answer
from tests.engine.triton_interpreter import DEVICE, load

triton_masks = load("rota.engine.sampling.triton_sampling")
triton_biases = load("rota.engine.sampling.triton_sampling")


def on_device(logits: Tensor, masks: Masks | None, limits: RowMasks | None) -> Tensor:
    """The twin for a GPU, with all its tensors there."""
    given = (
        None if one is None else type(one)(*(getattr(one, each.name).to(DEVICE) for each in fields(one)))
        for one in (masks, limits)
    )
    masked: Tensor = triton_masks.mask_logits(logits.to(DEVICE), *given)
    return masked.cpu()


WAYS = pytest.mark.parametrize("way", [mask_logits, on_device], ids=["cpu", "triton"])


@WAYS
@pytest.mark.parametrize("vocabulary", [31, 32, 300, triton_masks.LARGEST_MASK_TILE + 45])
def test_what_a_mask_does_not_name_is_impossible(way, vocabulary):
    dice = random.Random(vocabulary)
    allowed = [
        sorted(dice.sample(range(vocabulary), 9)),
        None,
        [vocabulary - 1],
        range(vocabulary),
        [*range(0, vocabulary, 2)],
        None,
        [],
    ]
    logits = torch.randn(len(allowed), vocabulary)
    right = logits.clone()
    for row, tokens in enumerate(allowed):
        if tokens is not None:
            right[row] = -torch.inf
            right[row, list(tokens)] = logits[row, list(tokens)]

    assert torch.equal(way(logits, masks_of(allowed, vocabulary), None), right)


@WAYS
def test_logits_and_masks_may_be_parts_of_larger_tensors(way):
    buffer = torch.randn(3, 200)
    masks = masks_of([[1, 99], None, [64]], 100)
    together = torch.cat([masks.lines, masks.bits.flatten()])
    found = way(buffer[:, :100], Masks(together[:3], together[3:].view(2, 4)), None)

    assert torch.equal(found[1], buffer[1, :100])
    assert found.isfinite().sum(1).tolist() == [2, 100, 1]
    assert found.argmax(1)[2] == 64


@WAYS
def test_masked_logits_are_float32_whatever_the_model_s_precision(way):
    logits = torch.randn(2, 100).to(torch.bfloat16)
    found = way(logits, masks_of([[5], None], 100), None)

    assert found.dtype == torch.float32
    assert found[0, 5] == logits[0, 5].float()
    assert torch.equal(found[1], logits[1].float())


@pytest.mark.parametrize("way", [add_biases, triton_biases.add_biases], ids=["torch", "triton"])
def test_biases_are_added_to_a_row_s_own_tokens(way):
    tokens = torch.stack([torch.randperm(60)[:12] for _ in range(4)])
    values, counts = torch.randn(4, 12), torch.tensor([[9.0, 0.0], [9.0, 12.0], [9.0, 1.0], [9.0, 7.0]])
    logits, rows = torch.randn(3, 60), [3, 1, 0]
    right = logits.clone()
    for place, row in enumerate(rows):
        for token, value in list(zip(tokens[row], values[row], strict=True))[: int(counts[row, 1])]:
            right[place, token] += value
    found = logits.clone().to(DEVICE)
    biases = Biases(counts.to(DEVICE)[:, 1], tokens.to(DEVICE), values.to(DEVICE))
    way(found, torch.tensor(rows, dtype=torch.int32, device=DEVICE), biases)

    assert torch.equal(found.cpu(), right)


def limits_of(rows: list[int], lengths: list[int], vocabulary: int) -> RowMasks:
    """Row 0 has no limits; row 1 a mask; row 2 one for its first tokens; row 3 has both. Masks: threes and fives."""
    masks = [packed(range(0, vocabulary, 3), vocabulary), packed(range(0, vocabulary, 5), vocabulary)]
    scopes = torch.tensor([[9.0, 0.0, 0.0], [9.0, 1.0, 0.0], [9.0, 0.0, 7.0], [9.0, 1.0, 7.0]])
    bits = torch.from_numpy(np.stack([np.stack(masks)] * 4))
    return RowMasks(*(torch.tensor(each, dtype=torch.int32) for each in (rows, lengths)), scopes[:, 1:], bits)


@WAYS
@pytest.mark.parametrize("vocabulary", [33, triton_masks.LARGEST_MASK_TILE + 45])
def test_limits_hold_for_the_rows_that_have_them_and_for_as_long_as_they_do(way, vocabulary):
    rows, lengths = [3, 0, 1, 2, 3, 2], [6, 6, 6, 6, 7, 7]
    logits = torch.randn(len(rows), vocabulary)
    steps = [3, 1, 5, 3, 5, 1]
    right = torch.full_like(logits, -torch.inf)
    for place, step in enumerate(steps):
        right[place, ::step] = logits[place, ::step]
    limits = limits_of(rows, lengths, vocabulary)

    assert torch.equal(way(logits, None, limits), right)

    masks = masks_of([None, [0, 15, 30], None, [0, 1, 2, 3], [5, 3], None], vocabulary)
    both = way(logits, masks, limits)
    kept = [torch.nonzero(row > -torch.inf).flatten().tolist() for row in both]
    assert [kept[1], kept[3], kept[4]] == [[0, 15, 30], [0, 3], [5]]
    assert torch.equal(both[[0, 2, 5]], right[[0, 2, 5]])


# What a request says of single tokens holds for its own row, as a plain model of each field says.

VOCABULARY = 70


@dataclass
class Plain:
    """One answer by the plainest possible means: greedy, a token at a time."""

    params: SamplingParams
    answer: list[int] = field(default_factory=list)

    def next(self, logits: list[float]) -> int:
        weighed = dict(enumerate(logits))
        for token, bias in self.params.logit_bias:
            weighed[token] += bias
        for token in weighed:
            count = self.answer.count(token)
            weighed[token] -= count * self.params.frequency_penalty + (count > 0) * self.params.presence_penalty
        best = max((token for token in weighed if self.may_come(token)), key=lambda token: (weighed[token], -token))
        self.answer.append(best)
        return best

    def may_come(self, token: int) -> bool:
        allowed = self.params.allowed_token_ids
        if allowed is not None and token not in allowed:
            return False
        if token in self.params.stop_token_ids and len(self.answer) < self.params.min_new_tokens:
            return False
        written = (*self.answer, token)
        return not any(written[-len(word) :] == word for word in self.params.bad_words)


FIELDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "logit_bias": {"logit_bias": ((3, 5.0), (69, 4.0), (0, -100.0))},
    "min_new_tokens": {"min_new_tokens": 4, "stop_token_ids": frozenset(range(0, 70, 2)) | {900}},
    "allowed_token_ids": {"allowed_token_ids": (1, 31, 32, 33, 63, 64, 69)},
    "bad_words": {"bad_words": ((5,), (6,), (64,), *((token,) for token in range(20, 60)))},
    "longer bad words": {
        "allowed_token_ids": (7, 8, 11),
        "bad_words": ((7, 7), (8, 8, 8), (7, 8, 7, 8), (9, 9, 9, 9, 9)),
    },
    "all at once": {
        "logit_bias": ((8, 3.0), (9, 3.0)),
        "min_new_tokens": 3,
        "stop_token_ids": frozenset({9}),
        "allowed_token_ids": tuple(range(5, 40)),
        "bad_words": ((8,), (9, 9), (10, 9)),
        "frequency_penalty": 0.8,
        "presence_penalty": 0.4,
    },
}


def seat(row: int, written: tuple[int, ...] = (), **fields: Any) -> Seat:
    params = SamplingParams(**{"temperature": 0.0, **fields})
    return Seat(
        request_id=RequestId(f"r{row}"),
        row=Row(row),
        adapter_id=BASE,
        tokens=(1, 2, 3, *written),
        prompt_length=3,
        blocks=(),
        sampling=params,
    )


class Story:
    """Rows of one sampler with their guides, step after step."""

    def __init__(self, rows: int) -> None:
        self._sampler = Sampler(rows, VOCABULARY, torch.device(DEVICE))
        self._guides = Guides(VOCABULARY, torch.device(DEVICE))
        self._guides.use(FakeGrammars(VOCABULARY))

    def seat(self, *seats: Seat) -> None:
        self._sampler.seat(seats)
        self._guides.seat(seats)

    def step(self, logits: Tensor, rows: list[int], lengths: list[int]) -> list[int]:
        guided = self._guides.of([Row(row) for row in rows])
        masks, _ = self._guides.guidance(guided, len(rows))
        on_device = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (rows, lengths))
        sampled = self._sampler.sample(logits.to(DEVICE), *on_device, np.array(rows), masks)
        tokens = sampled.tokens
        if sampled.is_stuck is not None:
            tokens = tokens.masked_fill(sampled.is_stuck, NO_CHOICE)
        for at, guide in guided:
            guide.accept(int(tokens[at]))
        found: list[int] = tokens.tolist()
        return found


@pytest.mark.parametrize("place", range(len(FIELDS)), ids=list(FIELDS))
def test_a_field_does_what_the_plain_model_says_in_a_step_of_all_kinds(place):
    dice = torch.Generator().manual_seed(place)
    story = Story(len(FIELDS) + 2)
    kinds = list(FIELDS.values())
    kinds = kinds[place:] + kinds[:place]  # each kind in every row: nobody inherits
    plain = [Plain(seat(0, **fields).sampling) for fields in kinds]
    for row in range(len(kinds)):
        story.seat(seat(row, **list(FIELDS.values())[row]))
    story.step(torch.zeros(len(kinds), VOCABULARY), list(range(len(kinds))), [3] * len(kinds))
    story.seat(*(seat(row, **fields) for row, fields in enumerate(kinds)))
    order = [*range(1, len(kinds)), 0]
    for number in range(12):
        logits = torch.randn(len(kinds), VOCABULARY, generator=dice)
        found = story.step(logits[order], order, [3 + number] * len(order))
        assert found == [plain[row].next(logits[row].tolist()) for row in order]


@pytest.mark.parametrize("kind", FIELDS)
def test_a_sequence_that_was_preempted_goes_on_under_the_same_rules(kind):
    dice = torch.Generator().manual_seed(3)
    story, plain = Story(4), Plain(seat(0, **FIELDS[kind]).sampling)
    for number in range(10):
        story.seat(seat(number % 4, tuple(plain.answer), **FIELDS[kind]))
        logits = torch.randn(1, VOCABULARY, generator=dice)
        assert story.step(logits, [number % 4], [3 + number]) == [plain.next(logits[0].tolist())]


def test_drawn_tokens_obey_too_and_the_others_draw_as_before():
    allowed = {"allowed_token_ids": (3, 40, 69), "temperature": 2.0, "seed": 5}
    alone, among = Story(2), Story(2)
    alone.seat(seat(1, temperature=1.0, seed=9))
    among.seat(seat(0, **allowed), seat(1, temperature=1.0, seed=9))
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(1))
    found = [among.step(logits, [0, 1], [length, length]) for length in range(3, 60)]

    assert {tokens[0] for tokens in found} == {3, 40, 69}
    assert [tokens[1] for tokens in found] == [alone.step(logits[1:], [1], [length])[0] for length in range(3, 60)]


def test_a_request_that_excludes_every_token_gets_none_and_others_do():
    story = Story(3)
    story.seat(
        seat(0, allowed_token_ids=(4, 5), bad_words=((4,), (5,))),
        seat(1),
        seat(2, temperature=1.0, seed=1, allowed_token_ids=(6,), stop_token_ids=frozenset({6}), min_new_tokens=2),
    )
    logits = torch.randn(3, VOCABULARY)

    assert story.step(logits, [0, 1, 2], [3, 3, 3]) == [NO_CHOICE, int(logits[1].argmax()), NO_CHOICE]
    assert story.step(logits[2:], [2], [5]) == [6]


def test_top_n_sigma_keeps_what_lies_within_so_many_deviations_of_the_likeliest():
    logits = torch.randn(3, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[1, ::2] = -torch.inf
    kept = keep_top_sigmas(logits, torch.tensor([1.0, 1.5, 0.0]))
    for row, sigmas in ((0, 1.0), (1, 1.5)):
        possible = [value for value in logits[row].tolist() if value > -math.inf]
        limit = max(possible) - sigmas * float(np.std(possible))
        assert (kept[row] > -torch.inf).tolist() == [value >= limit for value in logits[row].tolist()]
    assert torch.equal(kept[2], logits[2])


def test_top_n_sigma_holds_for_the_rows_that_asked():
    story = Story(2)
    story.seat(seat(0, temperature=3.0, seed=1, top_n_sigma=0.5), seat(1, temperature=3.0, seed=1))
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    limit = float(logits[0].max() - 0.5 * logits[0].std(correction=0))
    found = [story.step(logits, [0, 1], [length, length]) for length in range(3, 80)]

    assert all(logits[0, tokens[0]] >= limit for tokens in found)
    assert any(logits[0, tokens[1]] < limit for tokens in found)


def test_bad_words_know_every_way_in_which_a_word_may_end():
    dice = random.Random(0)
    words = [tuple(dice.randrange(3) for _ in range(dice.randrange(2, 6))) for _ in range(9)]
    written: list[int] = []
    bad = BadWords(words, ())
    for _ in range(300):
        right = {token for token in range(3) if any((*written, token)[-len(word) :] == word for word in words)}
        assert set(bad.forbidden) == right
        assert set(BadWords(words, written).forbidden) == right
        written.append(dice.randrange(3))
        bad.accept(written[-1])


def test_an_answer_is_the_same_however_often_its_row_changes(tmp_path):
    make_tiny_model(tmp_path, "llama3")
    engine = build(tmp_path)
    params = SamplingParams(
        temperature=0.9,
        seed=4,
        logprobs=2,
        min_new_tokens=9,
        stop_token_ids=frozenset(range(0, 256, 3)),
        logit_bias=tuple((token, 2.0) for token in range(0, 256, 3)),
        bad_words=((1, 2), (8,)),
        allowed_token_ids=tuple(range(200)),
    )
    right = answer(engine, params, moves_every=None)
    tokens = [told[0] for told, _ in right]

    assert answer(engine, params, moves_every=1) == right
    assert not any(token % 3 == 0 for token in tokens[:9])
    assert any(token % 3 == 0 for token in tokens[9:])
    assert max(tokens) < 200
    engine.close()


def test_fields_hold_together_with_grammars_while_two_steps_are_in_flight(tmp_path):
    make_tiny_model(tmp_path, "llama3")
    engine = build(tmp_path)
    engine.use_grammars(FakeGrammars())
    fields = {
        "temperature": 1.2,
        "seed": 4,
        "min_new_tokens": 20,
        "stop_token_ids": frozenset(range(0, 256, 3)),
        "logit_bias": tuple((token, 3.0) for token in range(0, 256, 3)),
        "bad_words": ((8,), *((first, second) for first in range(0, 256, 2) for second in (1, 3))),
    }
    words = SamplingParams(**fields)
    both = SamplingParams(**fields, grammar=Grammar("mod 7"), allowed_token_ids=tuple(range(200)))
    free = SamplingParams(temperature=0.9, seed=2)
    alone = in_flight(engine, [free, free, free], 30, 2)
    first, second = (in_flight(engine, [words, free, both], 30, depth) for depth in (1, 2))
    engine.close()

    assert first == second
    assert second[1] == alone[1]
    assert obeys(second[2], 7)
    assert max(second[2]) < 200
    for tokens in (second[0], second[2]):
        assert not any(token % 3 == 0 for token in tokens[:20])
        assert not any(pair in fields["bad_words"] for pair in pairwise(tokens))
