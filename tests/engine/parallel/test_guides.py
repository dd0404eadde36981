"""Ranks follow grammars together, though rank 0 alone knows them and draws its steps late."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from rota.core.grammar import Grammar
from rota.core.ids import AdapterId
from rota.core.request import Pooling
from tests.builders import request
from tests.engine.fake_grammars import FakeGrammars, obeys
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.engine.parallel.ranks import OverlappedDevice
from tests.engine.parallel.story import ADAPTERS, WAYS, GroupServer, play
from tests.worlds import endings

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("guided")
    model = make_tiny_model(folder / "model", "llama3")
    for number in range(1, ADAPTERS + 1):
        make_adapter(folder / str(number), model, seed=number)
    return folder


KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "guided": {"grammar": Grammar("mod 7")},
    "limited": {
        "logit_bias": ((9, 4.0), (10, -4.0)),
        "allowed_token_ids": tuple(range(0, 250, 2)),
        "bad_words": ((8,), (12, 14)),
        "min_new_tokens": 3,
        "stop_token_ids": frozenset(range(0, 250, 8)),
    },
}


def test_two_ranks_under_grammars_and_limits_answer_as_one_does(folder, group_of):
    requests = [
        request(f"{way} {kind}", 5 + 9 * place, 7, adapter=AdapterId(place), **WAYS[way][0], **KINDS[kind])
        for place, way in enumerate(("greedy", "penalised", "all of it"))
        for kind in KINDS
    ]
    alone = GroupServer(folder / "model", None)
    alone.engine.use_grammars(FakeGrammars())
    one = play(alone, folder, requests)
    together = GroupServer(folder / "model", group_of(2))
    together.engine = OverlappedDevice(group_of(2), together.engine.capacity)
    two = play(together, folder, requests)

    assert two.tokens == one.tokens
    assert two.failures == 0
    assert all(obeys(tokens, 7) for id, tokens in two.tokens.items() if id.endswith("guided"))
    assert all(token % 2 == 0 for id, tokens in two.tokens.items() if id.endswith("limited") for token in tokens)


def test_two_ranks_pool_as_one_does(folder, group_of):
    requests = [
        request(f"{pooling} {length}", length, pooling=pooling) for pooling in POOLINGS for length in (1, 9, 50)
    ]
    one, two = (
        endings(GroupServer(folder / "model", ranks, kv_blocks=64).serve(requests)) for ranks in (None, group_of(2))
    )

    for id, end in one.items():
        assert two[id].embedding == pytest.approx(end.embedding, abs=1e-4)
