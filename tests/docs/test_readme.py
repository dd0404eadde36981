"""What the README tells people to type works as it stands: every block of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from docs.generate.pages import DOCS
from examples.builtin_adapters.styles import STYLES
from tests.docs.conftest import Type, port_option
from tests.docs.fences import blocks
from tests.processes import run_program
from tests.waiting import PATIENCE_S, line_of

ROOT = DOCS.parent
README = (ROOT / "README.md").read_text("utf-8")
README_URL = "http://127.0.0.1:30000"
BLOCKS = blocks(README, "console", "python", "bash", "sh")

# A word by which each block is known, in the README's order, and which test runs it.
KNOWN_BY = {
    "make serve": "test_two_commands_serve_and_ask",
    '"model": "SmolLM2-135M-Instruct"': "test_its_curl_commands_are_answered_each_by_whom_they_ask",
    '"model": "pirate"': "test_its_curl_commands_are_answered_each_by_whom_they_ask",
    "from openai": "test_its_openai_example_prints_a_plain_answer_and_a_pirates",
    "make demo": "test_its_demo_opens_a_page_and_ends_with_one_interrupt",
    "import LLM": "test_its_offline_example_prints_a_plain_answer_and_a_poem",
    "rota adapters inspect": "test_an_adapter_can_be_looked_at",
    "rota serve": "test_adapters_of_ones_own_are_served_and_one_more_is_loaded",
    "load_lora_adapter": "test_adapters_of_ones_own_are_served_and_one_more_is_loaded",
    "rota simulate": "test_a_workload_can_be_simulated_and_drawn",
}

needs_curl = pytest.mark.skipif(
    shutil.which("curl") is None, reason="runs the curl command, which is not installed on this machine"
)


def the_block(word: str) -> str:
    """The one block of the README that holds a word."""
    assert word in KNOWN_BY
    (found,) = [block for block in BLOCKS if word in block]
    return found


def test_every_block_is_run_by_a_test():
    assert [the_block(word) for word in KNOWN_BY] == BLOCKS
    assert set(KNOWN_BY.values()) <= set(globals())


def test_two_commands_serve_and_ask(readme_url):
    assert the_block("make serve") == "make serve\n"  # which is what the fixture types
    assert httpx.get(f"{readme_url}/health", timeout=PATIENCE_S).json() == {"status": "ready"}


@needs_curl
@pytest.mark.parametrize(("model", "is_pirate"), [("SmolLM2-135M-Instruct", False), ("pirate", True)])
def test_its_curl_commands_are_answered_each_by_whom_they_ask(readme_url, model, is_pirate):
    answer = json.loads(curl(f'"model": "{model}"', readme_url))

    assert answer["model"] == model
    assert STYLES["pirate"].check("What is the moon?", answer["choices"][0]["message"]["content"]) == is_pirate


def curl(word: str, url: str) -> str:
    return run_program(["bash", "-c", the_block(word).replace(README_URL, url)]).stdout


def test_its_openai_example_prints_a_plain_answer_and_a_pirates(readme_url, capsys):
    exec(the_block("from openai").replace(README_URL, readme_url), {})
    plain, pirate = capsys.readouterr().out.strip().rsplit("pirate: ", 1)

    assert plain.startswith("SmolLM2-135M-Instruct: ")
    assert STYLES["pirate"].check("How do boats float?", pirate)
    assert not STYLES["pirate"].check("How do boats float?", plain)


def test_its_demo_opens_a_page_and_ends_with_one_interrupt(type_in: Type, tmp_path: Path):
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    with type_in(the_block("make demo"), ARGS=port_option(), BROWSER=str(browser)) as demo:
        page = line_of(demo, "Watch it at ").split()[3]
        assert httpx.get(page, timeout=PATIENCE_S).status_code == 200
        os.killpg(demo.pid, signal.SIGINT)
        demo.wait()

    assert (tmp_path / "opened").read_text().strip() == page


def test_its_offline_example_prints_a_plain_answer_and_a_poem(capsys):
    exec(the_block("import LLM"), {})
    plain, poem = capsys.readouterr().out.strip().rsplit("haiku: ", 1)

    assert plain.startswith("base: ")
    assert STYLES["haiku"].check("What is a rainbow?", poem)


def test_an_adapter_can_be_looked_at(type_in: Type):
    with type_in(the_block("rota adapters inspect")) as shell:
        said, _ = shell.communicate()

    assert shell.returncode == 0
    assert "SmolLM2-135M-Instruct" in said


@pytest.fixture
def own_url(type_in: Type) -> Iterator[str]:
    with type_in(f"{the_block('rota serve').strip()} {port_option()}") as server:
        yield line_of(server, "Rota serves ").split()[-1]
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0


@needs_curl
def test_adapters_of_ones_own_are_served_and_one_more_is_loaded(own_url):
    curl("load_lora_adapter", own_url)
    models = [model["id"] for model in httpx.get(f"{own_url}/v1/models", timeout=PATIENCE_S).json()["data"]]

    assert {"legal", "support", "sales"} <= set(models)


def test_a_workload_can_be_simulated_and_drawn(type_in: Type, tmp_path: Path):
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")  # elsewhere, because it leaves a picture where it is run
    with type_in(the_block("rota simulate"), tmp_path) as shell:
        said, _ = shell.communicate()

    assert shell.returncode == 0
    assert "rotate" in said
    assert (tmp_path / "turns.png").read_bytes().startswith(b"\x89PNG")
