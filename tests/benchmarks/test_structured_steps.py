"""The vocabulary made for measurements spells JSON, and what is measured is what it says."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from rota.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        import structured_steps

        return structured_steps


def test_the_vocabulary_is_as_large_as_llama_s_and_spells_every_text(script, tmp_path):
    script.write_json_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    text = json.dumps({"name": "Zoë", "tags": ["a b", "\n"], "score": 1.5})

    assert (tokenizer.ids, tokenizer.vocab_size) == (script.VOCABULARY, script.VOCABULARY)
    assert tokenizer.eos_ids == {script.END}
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_row_has_a_schema_of_its_own(script):
    assert len({script.grammar_of(row).text for row in range(64)}) == 64


@pytest.mark.long("builds an engine over 128,256 tokens and serves some hundred requests")
def test_every_kind_is_measured(script, tmp_path):
    stage, grammars, adapters = script.start(tmp_path, script.SHAPES["tiny"], 3)
    runs = script.measure_runs(stage, grammars, adapters, rows=3, tokens=5, rounds=1)
    first = script.measure_first_tokens(stage)
    stage.engine.close()

    assert runs["nothing"]["of_nothing"] == 1.0
    assert [name for name, run in runs.items() if run["masks_ms"]] == ["schemas", "schemas for every second"]
    assert all(run["tokens_per_s"] > 0 for run in runs.values())
    assert len(first) == 3
