"""Ranks that read their parts of a folder in few bits answer as one rank does."""

from __future__ import annotations

import pytest

from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.parallel.story import ADAPTERS, GroupServer, asked, play
from tests.engine.weights.writers import write_model

NEW_TOKENS = 8


@pytest.mark.parametrize("layout", ["8: fine-grained", "4: GPTQ, by importance"])
def test_two_ranks_of_a_folder_in_few_bits_answer_as_one_does(layout, tmp_path, group_of):
    model = write_model(tmp_path / "model", layout)
    for number in range(1, ADAPTERS + 1):
        make_adapter(tmp_path / str(number), model, seed=number)
    one = play(GroupServer(tmp_path / "model", None), tmp_path, asked(NEW_TOKENS))
    two = play(GroupServer(tmp_path / "model", group_of(2)), tmp_path, asked(NEW_TOKENS))

    assert two.tokens == one.tokens
    assert two.failures == 0
