"""On a GPU, in graphs and outside, a sequence that loses its row goes on in another row as if nothing had happened."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from rota.core.ids import RequestId
from tests.engine.agreement import agrees
from tests.engine.eager_story import build
from tests.engine.lora.adapter_factory import load_with_peft, make_adapter
from tests.engine.lora.mixed_server import adapter
from tests.engine.model_factory import make_tiny_model
from tests.engine.row_story import SAMPLINGS, FewRows, answer, asked
from tests.worlds import outputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; CI has none")

ADAPTERS, NEW_TOKENS = 4, 40


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "model"
    make_tiny_model(path, "llama3")
    return path


@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize("way", SAMPLINGS)
def test_a_sequence_that_moves_to_another_row_gets_the_same_tokens_and_logprobs(model_path, way, has_graphs):
    engine = build(model_path, device="cuda", enable_cuda_graphs=has_graphs)
    right = answer(engine, SAMPLINGS[way], moves_every=None)

    assert answer(engine, SAMPLINGS[way], moves_every=3) == right
    assert answer(engine, SAMPLINGS[way], moves_every=1) == right
    engine.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_agree_with_the_reference_if_parked_rows_are_taken_all_the_time(tmp_path, depth):
    model = make_tiny_model(tmp_path / "model", "llama3")
    rounded = copy.deepcopy(model).to(torch.bfloat16).float()
    for number in range(1, ADAPTERS + 1):
        make_adapter(tmp_path / str(number), model, seed=number, r=4)
    server = FewRows(tmp_path / "model", 3, depth, dtype="bfloat16", device="cuda")
    server.add(*(adapter(number, tmp_path) for number in range(1, ADAPTERS + 1)))
    requests = asked(ADAPTERS, NEW_TOKENS)
    given = outputs(server.serve(requests))

    assert server.resumed > len(requests) // 2
    assert server.prompt_tokens == sum(len(one.prompt) for one in requests), "no prompt is computed twice"
    for number in range(1, ADAPTERS + 1):
        reference = load_with_peft(tmp_path / str(number), rounded)
        greedy = next(one for one in requests if one.request_id == f"{number}-0")
        assert agrees(reference, greedy.prompt, given[RequestId(f"{number}-0")]), f"adapter {number}"
        assert all(len(given[RequestId(f"{number}-{way}")]) == NEW_TOKENS for way in range(4))
    server.engine.close()
