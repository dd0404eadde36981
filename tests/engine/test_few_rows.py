"""A sequence that loses its row goes on in another row as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.eager_story import build
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.lora.mixed_server import adapter
from tests.engine.model_factory import make_tiny_model
from tests.engine.row_story import SAMPLINGS, FewRows, answer, asked, logprobs
from tests.worlds import outputs

ADAPTERS, NEW_TOKENS = 3, 20


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and adapters of it."""
    root = tmp_path_factory.mktemp("rows")
    model = make_tiny_model(root / "model", "llama3")
    for number in range(1, ADAPTERS + 1):
        make_adapter(root / str(number), model, seed=number, r=4)
    return root


@pytest.mark.parametrize("way", SAMPLINGS)
def test_a_sequence_that_moves_to_another_row_gets_the_same_tokens_and_logprobs(made, way):
    engine = build(made / "model")
    right = answer(engine, SAMPLINGS[way], moves_every=None)

    assert answer(engine, SAMPLINGS[way], moves_every=3) == right
    assert answer(engine, SAMPLINGS[way], moves_every=1) == right
    assert len({tokens for tokens, _ in right}) > 3
    engine.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_are_the_same_if_parked_rows_are_taken_all_the_time(made, depth):
    requests = asked(ADAPTERS, NEW_TOKENS)
    answers, scores = [], []
    for rows in (len(requests), 3):
        server = FewRows(made / "model", rows, depth)
        server.add(*(adapter(number, made) for number in range(1, ADAPTERS + 1)))
        events = server.serve(requests)
        answers.append(outputs(events))
        scores.append(logprobs(events))
        assert server.prompt_tokens == sum(len(one.prompt) for one in requests), "no prompt is computed twice"
        server.engine.close()

    assert answers[1] == answers[0]
    assert server.resumed > len(requests) // 2
    assert scores[1].keys() == scores[0].keys()
    for id, right in scores[0].items():
        found = scores[1][id]
        assert [one.chosen for one in found] == pytest.approx([one.chosen for one in right], abs=1e-4)
        assert len(found) == NEW_TOKENS
