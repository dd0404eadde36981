"""What the README tells people to type works as it stands."""

from __future__ import annotations

import json
import shutil

import pytest

from docs.generate.pages import DOCS
from examples.builtin_adapters.styles import STYLES
from tests.docs.fences import blocks
from tests.processes import run_program

ROOT = DOCS.parent
README = (ROOT / "README.md").read_text("utf-8")
README_URL = "http://127.0.0.1:30000"


def the_block(kind: str, word: str) -> str:
    """The one block of the README that holds a word."""
    (found,) = [block for block in blocks(README, kind) if word in block]
    return found


def test_two_commands_serve_and_ask():
    assert blocks(README, "console")[0] == "make serve\n"
    command = ["make", "--dry-run", "--no-print-directory", "serve"]
    shown = run_program(command, cwd=ROOT).stdout

    assert shown.splitlines()[-1].split() == [".venv/bin/rota", "serve"]


@pytest.mark.skipif(
    shutil.which("curl") is None, reason="runs the curl command, which is not installed on this machine"
)
@pytest.mark.parametrize(("model", "is_pirate"), [("SmolLM2-135M-Instruct", False), ("pirate", True)])
def test_its_curl_commands_are_answered_each_by_whom_they_ask(readme_url, model, is_pirate):
    command = the_block("console", f'"model": "{model}"')
    answer = json.loads(run_program(["bash", "-c", command.replace(README_URL, readme_url)]).stdout)

    assert answer["model"] == model
    assert STYLES["pirate"].check("What is the moon?", answer["choices"][0]["message"]["content"]) == is_pirate


def test_its_openai_example_prints_a_plain_answer_and_a_pirates(readme_url, capsys):
    exec(the_block("python", "openai").replace(README_URL, readme_url), {})
    plain, pirate = capsys.readouterr().out.strip().rsplit("pirate: ", 1)

    assert plain.startswith("SmolLM2-135M-Instruct: ")
    assert STYLES["pirate"].check("How do boats float?", pirate)
    assert not STYLES["pirate"].check("How do boats float?", plain)


def test_its_offline_example_prints_a_plain_answer_and_a_poem(capsys):
    exec(the_block("python", "LLM"), {})
    plain, poem = capsys.readouterr().out.strip().rsplit("haiku: ", 1)

    assert plain.startswith("base: ")
    assert STYLES["haiku"].check("What is a rainbow?", poem)
