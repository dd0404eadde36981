"""What grammars cost can be measured with any tokenizer, and steps with them with one that spells JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import grammar_cost
from rota.text.tokenizer import Tokenizer
from tests.tiny_tokenizer import write_byte_tokenizer


@pytest.fixture(scope="module")
def script() -> ModuleType:
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


# ── on the host ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_cost_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, output = write_byte_tokenizer(tmp_path / "model"), tmp_path / "costs.json"
    monkeypatch.setattr(sys, "argv", ["grammar_cost.py", "--folder", str(folder), "--output", str(output)])
    monkeypatch.setattr(grammar_cost, "ROUNDS", 2)
    grammar_cost.main()
    costs = json.loads(output.read_text())
    assert costs["tokens"] == 256
    assert costs["check of a known grammar"] < costs["check"] < costs["first check, with the start of the process"]
    assert costs["forced tokens"]["share"] < costs["forced tokens without free blanks"]["share"] < 1
