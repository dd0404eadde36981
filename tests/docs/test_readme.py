"""What the README tells people to type works as it stands: every block of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import httpx
import pytest

from docs.generate.pages import DOCS
from examples.builtin_adapters.styles import STYLES
from tests.docs.conftest import Type
from tests.docs.fences import blocks
from tests.processes import run_program
from tests.waiting import PATIENCE_S, line_of, until

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
    "make demo": "test_its_demo_opens_a_page_and_one_interrupt_ends_the_server_its_engine_and_its_traffic",
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


def test_two_commands_serve_and_ask(type_in: Type, readme_url):
    with type_in(the_block("make serve").replace("make", "make -n")) as shell:
        said, _ = shell.communicate()
    assert said.endswith("/bin/rota serve \n")
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


def test_its_demo_opens_a_page_and_one_interrupt_ends_the_server_its_engine_and_its_traffic(type_in: Type, tmp_path):
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    errors = tmp_path / "errors"
    command = f"{the_block('make demo').strip()} 2> {errors}"
    with type_in(command, ARGS="--port 0", BROWSER=str(browser)) as demo:
        page = line_of(demo, "Watch it at ").split()[3]
        assert httpx.get(page, timeout=PATIENCE_S).status_code == 200
        assert httpx.get(page.replace("/dashboard", "/health"), timeout=PATIENCE_S).json()["status"] == "ready"
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does: everybody in the group hears it
        demo.wait()
        assert until(lambda: not is_a_group(demo.pid))

    assert (tmp_path / "opened").read_text().strip() == page
    assert "Traceback" not in errors.read_text()
    assert "Error" not in errors.read_text(), "make says how its command ended, unless it ended well"


def is_a_group(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


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


@needs_curl
def test_adapters_of_ones_own_are_served_and_one_more_is_loaded(readme_url):
    curl("load_lora_adapter", readme_url)
    models = [model["id"] for model in httpx.get(f"{readme_url}/v1/models", timeout=PATIENCE_S).json()["data"]]
    unload = {"lora_name": "sales"}
    httpx.post(f"{readme_url}/v1/unload_lora_adapter", json=unload, timeout=PATIENCE_S).raise_for_status()

    assert {"legal", "support", "sales"} <= set(models)


def test_a_workload_can_be_simulated_and_drawn(type_in: Type, tmp_path: Path):
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")  # elsewhere, because it leaves a picture where it is run
    with type_in(the_block("rota simulate"), tmp_path) as shell:
        said, _ = shell.communicate()

    assert shell.returncode == 0
    assert "rotate" in said
    assert (tmp_path / "turns.png").read_bytes().startswith(b"\x89PNG")
