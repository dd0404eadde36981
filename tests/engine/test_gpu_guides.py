"""On a GPU, in graphs and outside, answers follow their grammars and fields at depth 2, where draws wait for tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rota.core.grammar import Grammar
from rota.core.request import SamplingParams
from rota.engine.engine import Engine
from tests.engine.eager_story import build
from tests.engine.fake_grammars import FakeGrammars, obeys
from tests.engine.guided_story import in_flight
from tests.engine.model_factory import make_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; CI has none")

STEPS = 30
GUIDED: dict[str, Any] = {"grammar": Grammar("mod 7")}
LIMITED: dict[str, Any] = {
    "min_new_tokens": 20,
    "stop_token_ids": frozenset(range(0, 256, 3)),
    "logit_bias": tuple((token, 3.0) for token in range(0, 256, 3)),
    "allowed_token_ids": tuple(range(200)),
    "bad_words": ((8,), (1, 1), (4, 5, 6)),
}
DRAWN: dict[str, Any] = {"temperature": 1.2, "top_p": 0.9, "seed": 4, "frequency_penalty": 0.4, "logprobs": 2}
GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("guided") / "model"
    make_tiny_model(path, "llama3")
    return path


@pytest.fixture(scope="module", params=[True, False], ids=["graphs", "kernels"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Engine:
    made = build(folder, device="cuda", enable_cuda_graphs=request.param)
    made.use_grammars(FakeGrammars())
    return made


def answers(engine: Engine, depth: int, *fields: dict[str, Any]) -> list[list[int]]:
    return in_flight(engine, [SamplingParams(**one) for one in fields], STEPS, depth)


@pytest.mark.parametrize("way", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_answers_are_the_same_at_depth_2_and_nobody_else_s_change(engine, way):
    free = answers(engine, 2, way, way, way)
    guided = [answers(engine, depth, way | GUIDED, way, way | GUIDED) for depth in (1, 2)]

    assert guided[0] == guided[1]
    assert obeys(guided[1][0], 7)
    assert obeys(guided[1][2], 7)
    assert guided[1][1] == free[1]
    assert not obeys(free[0], 7)


@pytest.mark.parametrize("way", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_fields_about_tokens_hold_beside_grammars_and_rows_without(engine, way):
    free = answers(engine, 2, way, way, way)
    limited = [answers(engine, depth, way | LIMITED, way, way | LIMITED | GUIDED) for depth in (1, 2)]
    alone, other, both = limited[1]

    assert limited[0] == limited[1]
    assert other == free[1]
    assert obeys(both, 7)
    for tokens in (alone, both):
        assert max(tokens) < 200
        assert 8 not in tokens
        assert not any(token % 3 == 0 for token in tokens[:20])
    assert any(token % 3 == 0 for token in alone[20:])
