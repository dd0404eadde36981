"""Zeros in the weights of the unpacked built-in model, far behind their beginning, as a bad disk may leave them."""

from __future__ import annotations

import pytest

from rota.engine.folders.builtin import builtin_model_folder
from rota.engine.quantised.names import GROUPS_FILE
from tests.attacks.live import serving

ZEROS = 20 << 20


@pytest.mark.long("the built-in model is unpacked twice, and a whole server starts")
def test_a_spoiled_copy_of_the_model_is_made_anew_and_not_served(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights = builtin_model_folder(quiet=True) / GROUPS_FILE
    whole = weights.read_bytes()
    with weights.open("r+b") as file:
        file.seek(len(whole) // 4)
        file.write(bytes(ZEROS))

    with serving(tmp_path) as server:
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0.0}
        answer = server.boss.client.post("/v1/completions", json=body)

    assert "Paris" in answer.json()["choices"][0]["text"]
    assert weights.read_bytes() == whole
