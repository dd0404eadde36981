"""Every example is short, and runs."""

from __future__ import annotations

import runpy
import shutil
import sys

import pytest

from docs.generate.pages import DOCS
from examples.builtin_adapters.styles import STYLES
from tests.processes import run_program

EXAMPLES = DOCS.parent / "examples"
FILES = sorted(path for path in EXAMPLES.iterdir() if path.is_file())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_is_short_and_there_is_a_test_of_it(path):
    assert len(path.read_text("utf-8").splitlines()) < 50
    assert path.name in (DOCS.parent / "tests/docs/test_examples.py").read_text("utf-8")


@pytest.mark.skipif(
    shutil.which("curl") is None, reason="runs the curl command, which is not installed on this machine"
)
def test_the_example_with_curl_gets_an_answer_to_everything_it_asks(readme_url):
    said = run_program(["sh", EXAMPLES / "curl.sh", readme_url]).stdout

    assert '"status":"ready"' in said
    assert '"id":"pirate"' in said
    assert "Paris" in said
    assert said.rstrip().endswith("data: [DONE]")


def test_the_example_with_openai_has_two_adapters_answer_in_their_own_manner(readme_url, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["openai_client.py", readme_url])
    runpy.run_path(str(EXAMPLES / "openai_client.py"), run_name="__main__")
    asked, answers = capsys.readouterr().out.split("\n\npirate:\n")
    pirate, haiku = answers.split("\n\nhaiku:\n")

    assert "SmolLM2-135M-Instruct, " in asked
    assert STYLES["pirate"].check("Why do we sleep?", pirate)
    assert STYLES["haiku"].check("Why do we sleep?", haiku.strip())


def test_the_offline_example_answers_its_prompts(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["offline.py", "The capital of France is"])
    runpy.run_path(str(EXAMPLES / "offline.py"), run_name="__main__")
    said = capsys.readouterr().out

    assert "The capital of France is▸ Paris" in said
    assert "tokens, length)" in said
