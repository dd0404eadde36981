"""In every family an adapter's answers are PEFT's, mixed in one batch with another's and the base model's."""

from __future__ import annotations

import pytest

from rota import LLM, SamplingParams
from tests.engine.agreement import choices
from tests.engine.lora.adapter_factory import load_with_peft, make_adapter
from tests.engine.model_factory import FAMILIES, make_tiny_model
from tests.tiny_tokenizer import write_byte_tokenizer

PROMPTS = [[5, 9, 77, 130, 4], list(range(20, 60))]
NEW_TOKENS = 24


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_answer_as_they_do_under_peft(tmp_path, family):
    folder = write_byte_tokenizer(tmp_path / "model")
    model = make_tiny_model(folder, family)
    paths = {name: make_adapter(tmp_path / name, model, seed) for seed, name in enumerate(("pirate", "poet"))}
    tuned = {None: model, **{name: load_with_peft(path, model) for name, path in paths.items()}}
    llm = LLM(folder, adapters=paths, quiet=True, device="cpu", dtype="float32", max_loras_per_batch=1, kv_blocks=128)
    asked = [(prompt, name) for prompt in PROMPTS for name in tuned]

    answers = llm.generate(
        [prompt for prompt, _ in asked],
        SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True),
        adapter=[name for _, name in asked],
    )

    found = [list(one.token_ids) for one in answers]
    assert [len(tokens) for tokens in found] == [NEW_TOKENS] * len(asked)
    assert found == [
        choices(tuned[name], [prompt], [tokens])[0] for (prompt, name), tokens in zip(asked, found, strict=True)
    ]
    assert len({tuple(tokens) for tokens in found}) > 3
