"""The example of reinforcement gives a running server's adapter new versions, and the reward rises with them."""

from __future__ import annotations

import re
import runpy
import sys

import httpx
import pytest

from benchmarks.clients.trl.tiny_model import write_model, write_tokenizer
from docs.generate.pages import DOCS
from tests.processes import started
from tests.waiting import line_of

SCRIPT = DOCS.parent / "examples/reinforce/reinforce.py"
LINE = re.compile(r"vowels@(\d+): reward (\d\.\d\d)")
STEPS = 20


def test_the_example_is_short():
    assert len(SCRIPT.read_text("utf-8").splitlines()) <= 50


@pytest.mark.long("a server starts, and a model is trained for twenty steps")
def test_the_reward_rises_with_the_version(tmp_path, monkeypatch, capsys):
    write_model(tmp_path)
    write_tokenizer(tmp_path)
    flags = ("--port", "0", "--max-loras-per-batch", "2", "--max-lora-rank", "8")
    with started([sys.executable, "-m", "rota", "serve", str(tmp_path), *flags]) as server:
        url = line_of(server, "Rota serves ").split()[-1]
        monkeypatch.setattr(sys, "argv", ["reinforce.py", url, str(STEPS), "1e-2"])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        current = httpx.get(f"{url}/v1/adapters/vowels").json()["version"]

    told = [(int(version), float(reward)) for version, reward in LINE.findall(capsys.readouterr().out)]
    assert [version for version, _ in told] == list(range(1, STEPS + 1))
    assert current == STEPS
    assert told[-1][1] > 2 * told[0][1], told
