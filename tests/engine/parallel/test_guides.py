"""Ranks follow grammars together, though rank 0 alone knows them and draws its steps late."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.core.grammar import Grammar
from rota.core.ids import AdapterId
from tests.builders import request
from tests.engine.fake_grammars import FakeGrammars, obeys
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.engine.parallel.ranks import OverlappedDevice
from tests.engine.parallel.story import ADAPTERS, WAYS, GroupServer, play


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("guided")
    model = make_tiny_model(folder / "model", "llama3")
    for number in range(1, ADAPTERS + 1):
        make_adapter(folder / str(number), model, seed=number)
    return folder


def test_two_ranks_under_grammars_answer_as_one_does(folder, group_of):
    guided = {"grammar": Grammar("mod 7")}
    requests = [
        request(f"{way} {bool(more)}", 5 + 9 * place, 10, adapter=AdapterId(place % 4), **fields, **more)
        for place, (way, (fields, _)) in enumerate(WAYS.items())
        for more in (guided, {})
    ]
    alone = GroupServer(folder / "model", None)
    alone.engine.use_grammars(FakeGrammars())
    one = play(alone, folder, requests)
    together = GroupServer(folder / "model", group_of(2))
    together.engine = OverlappedDevice(group_of(2), together.engine.capacity)
    two = play(together, folder, requests)

    assert two.tokens == one.tokens
    assert two.failures == 0
    assert all(obeys(tokens, 7) for id, tokens in two.tokens.items() if id.endswith("True"))
