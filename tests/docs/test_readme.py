"""What the README tells people to type works as it stands, every block of it, and so does every example."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest

import rota
from docs.generate.pages import DOCS
from examples.builtin_adapters.styles import STYLES
from rota import LLM
from rota.cli import main
from tests.docs.fences import blocks
from tests.processes import Program, run_program, started
from tests.waiting import line_of, until

ROOT = DOCS.parent
EXAMPLES = ROOT / "examples"
FILES = sorted(path for path in EXAMPLES.iterdir() if path.is_file())
README = (ROOT / "README.md").read_text("utf-8")
README_URL = "http://127.0.0.1:30000"
BLOCKS = blocks(README, "console", "python", "bash", "sh")

# A word by which each block is known, in the README's order, and which test runs it.
KNOWN_BY = {
    "make serve": "test_two_commands_serve_and_ask",
    '"model": "pirate"': "test_its_curl_command_is_answered_by_the_pirate",
    "from openai": "test_its_openai_example_prints_a_plain_answer_and_a_pirates",
    "make demo": "test_its_demo_opens_a_page_and_one_interrupt_ends_the_server_its_engine_and_its_traffic",
    "import LLM": "test_its_offline_example_prints_a_plain_answer_and_a_poem",
    "rota serve": "test_adapters_of_ones_own_are_served_and_one_more_is_loaded",
    "load_lora_adapter": "test_adapters_of_ones_own_are_served_and_one_more_is_loaded",
    "rota simulate": "test_a_workload_can_be_simulated_and_drawn",
}

# Starts a command of the README in a shell; further options are added to the environment.
Type = Callable[..., AbstractContextManager[Program]]

needs_curl = pytest.mark.skipif(
    shutil.which("curl") is None, reason="runs the curl command, which is not installed on this machine"
)


def the_block(word: str) -> str:
    """The one block of the README that holds a word."""
    assert word in KNOWN_BY
    (found,) = [block for block in BLOCKS if word in block]
    return found


@pytest.fixture(scope="module")
def type_in(tmp_path_factory: pytest.TempPathFactory) -> Type:
    """A shell as the README's reader has it: in the repository, after `make serve`, with `rota` on its path."""
    # What `make` would install is what runs this test.
    home = tmp_path_factory.mktemp("venv")
    binaries = Path(sys.executable).parent
    (home / "bin").symlink_to(binaries)
    for stamp in (".serve", ".dev"):
        (home / stamp).touch()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    path = f"{binaries}{os.pathsep}{inherited['PATH']}"

    @contextmanager
    def type_in(command: str, **environment: str) -> Iterator[Program]:
        variables = {**inherited, "PATH": path, "VENV": str(home), "ARGS": "", **environment}
        with started(["bash", "-c", command], cwd=ROOT, env=variables) as shell:
            yield shell

    return type_in


@pytest.fixture(scope="module")
def readme_url(type_in: Type) -> Iterator[str]:
    """Where the README's `rota serve` serves, on any port."""
    with type_in(f"{the_block('rota serve').strip()} --port 0") as server:
        yield line_of(server, "Rota serves ").split()[-1]
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_every_block_is_run_by_a_test():
    assert [the_block(word) for word in KNOWN_BY] == BLOCKS
    assert set(KNOWN_BY.values()) <= set(globals())


def test_two_commands_serve_and_ask(type_in: Type, readme_url):
    with type_in(the_block("make serve").replace("make", "make -n")) as shell:
        said, _ = shell.communicate()
    assert said.endswith("/bin/rota serve \n")
    assert httpx.get(f"{readme_url}/health").json() == {"status": "ready"}


@needs_curl
def test_its_curl_command_is_answered_by_the_pirate(readme_url):
    answer = json.loads(curl('"model": "pirate"', readme_url))

    assert answer["model"] == "pirate"
    assert STYLES["pirate"].check("What is the moon?", answer["choices"][0]["message"]["content"])


def curl(word: str, url: str) -> str:
    return run_program(["bash", "-c", the_block(word).replace(README_URL, url)]).stdout


def test_its_openai_example_prints_a_plain_answer_and_a_pirates(readme_url, capsys):
    exec(the_block("from openai").replace(README_URL, readme_url), {})
    plain, pirate = capsys.readouterr().out.strip().rsplit("pirate: ", 1)

    assert plain.startswith("SmolLM2-135M-Instruct: ")
    assert STYLES["pirate"].check("How do boats float?", pirate)
    assert not STYLES["pirate"].check("How do boats float?", plain)


def test_its_demo_opens_a_page_and_one_interrupt_ends_the_server_its_engine_and_its_traffic(type_in: Type, tmp_path):
    browser, opened, errors = (tmp_path / name for name in ("browser", "opened", "errors"))
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    command = f"{the_block('make demo').strip()} 2> {errors}"
    with type_in(command, ARGS="--port 0", BROWSER=str(browser)) as demo:
        page = line_of(demo, "Watch it at ").split()[3]
        assert httpx.get(page).status_code == 200
        assert httpx.get(page.replace("/dashboard", "/health")).json()["status"] == "ready"
        assert until(lambda: opened.is_file() and opened.read_text().strip() == page)
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does: everybody in the group hears it
        demo.wait()
        assert until(lambda: not is_a_group(demo.pid))

    assert "Traceback" not in errors.read_text()
    assert "Error" not in errors.read_text(), "make says how its command ended, unless it ended well"


def is_a_group(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def llm() -> LLM:
    """What `LLM()` gives to every example."""
    return LLM()


def test_its_offline_example_prints_a_plain_answer_and_a_poem(llm, monkeypatch, capsys):
    monkeypatch.setattr(rota, "LLM", lambda: llm)
    exec(the_block("import LLM"), {})
    plain, poem = capsys.readouterr().out.strip().rsplit("haiku: ", 1)

    assert plain.startswith("base: ")
    assert STYLES["haiku"].check("What is a rainbow?", poem)


def say_rota(block: str) -> None:
    """Runs a command of the README in this process."""
    name, *words = shlex.split(block)
    assert name == "rota"
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code


@needs_curl
def test_adapters_of_ones_own_are_served_and_one_more_is_loaded(readme_url):
    curl("load_lora_adapter", readme_url)
    models = [model["id"] for model in httpx.get(f"{readme_url}/v1/models").json()["data"]]
    unload = {"lora_name": "sales"}
    httpx.post(f"{readme_url}/v1/unload_lora_adapter", json=unload).raise_for_status()

    assert {"legal", "support", "sales"} <= set(models)


def test_a_workload_can_be_simulated_and_drawn(monkeypatch, capsys, tmp_path):
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")  # elsewhere, because it leaves a picture where it is run
    monkeypatch.chdir(tmp_path)
    say_rota(the_block("rota simulate"))

    assert "rotate" in capsys.readouterr().out
    assert (tmp_path / "turns.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_is_short_and_there_is_a_test_of_it(path):
    assert len(path.read_text("utf-8").splitlines()) < 50
    assert path.name in Path(__file__).read_text("utf-8")


@needs_curl
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


def test_the_offline_example_answers_its_prompts(llm, monkeypatch, capsys):
    monkeypatch.setattr(rota, "LLM", lambda: llm)
    monkeypatch.setattr(sys, "argv", ["offline.py", "The capital of France is"])
    runpy.run_path(str(EXAMPLES / "offline.py"), run_name="__main__")
    said = capsys.readouterr().out

    assert "The capital of France is▸ Paris" in said
    assert "tokens, length)" in said
