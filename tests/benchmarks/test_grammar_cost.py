"""What grammars cost on the host can be measured with any tokenizer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import grammar_cost
from tests.tiny_tokenizer import write_byte_tokenizer


def test_every_cost_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, output = write_byte_tokenizer(tmp_path / "model"), tmp_path / "costs.json"
    monkeypatch.setattr(sys, "argv", ["grammar_cost.py", "--folder", str(folder), "--output", str(output)])
    monkeypatch.setattr(grammar_cost, "ROUNDS", 2)
    grammar_cost.main()
    costs = json.loads(output.read_text())
    assert costs["tokens"] == 256
    assert costs["check of a known grammar"] < costs["check"] < costs["first check, with the start of the process"]
    assert costs["forced tokens"]["share"] < costs["forced tokens without free blanks"]["share"] < 1
