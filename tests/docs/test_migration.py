"""The pages for users of vLLM and SGLang: their commands work word for word, and they name what there is."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from docs.generate.commands import all_commands
from docs.generate.pages import DOCS
from docs.generate.routes import all_routes
from rota.observe.metric_table import METRICS, PICKER_METRICS
from tests.commands.peers import SGLANG, VLLM
from tests.docs.fences import blocks
from tests.processes import run_program, started
from tests.waiting import line_of

PEERS = {"vllm": VLLM, "sglang": SGLANG}
PAGES = {server: (DOCS / f"from-{server}.md").read_text("utf-8") for server in PEERS}
PORTS = {"vllm": 8000, "sglang": 30000}
OURS = {metric.name for metric in (*METRICS, *PICKER_METRICS)}


def section(server: str, title: str) -> str:
    _, _, text = PAGES[server].partition(f"\n## {title}\n")
    assert text
    return text.partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [cells for cells in lines if "---" not in cells[0] and cells[0] != "there"]


# ── what the pages name ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("server", PEERS)
def test_metrics_are_theirs_on_the_left_and_ours_on_the_right(server):
    found = rows(section(server, "Metrics"))
    theirs = {name for left, *_ in found for name in re.findall(r"`(\S+)`", left)}
    ours = {name for _, *right in found for name in re.findall(r"`((?:rota_|vllm:)\w+)`", " ".join(right))}

    assert len(theirs) > 20
    assert theirs <= PEERS[server]["metrics"]
    assert ours <= OURS
    assert set(re.findall(r"`(rota_\w+)`", PAGES[server])) <= OURS


@pytest.mark.parametrize("server", PEERS)
def test_routes_are_theirs_on_the_left_and_ours_on_the_right(server):
    found = rows(section(server, "Routes"))
    routes = {re.sub(r"^[A-Z]+ |:path(?=})", "", name) for one in all_routes().values() for name in one.names}
    theirs = {path for left, *_ in found for path in re.findall(r"`(/\S*)`", left)}
    ours = {path for _, here, *_ in found for path in re.findall(r"`(?:[A-Z]+ )?(/\S*)`", here)}
    same = {path for left, here, *_ in found if "the same" in here for path in re.findall(r"`(/\S*)`", left)}

    assert len(theirs) > 20
    assert theirs - {"/metrics"} <= PEERS[server]["routes"]  # that one is mounted, and no route of the table
    assert ours | same <= routes


@pytest.mark.parametrize("server", PEERS)
def test_flags_that_are_called_the_same_are_theirs_and_ours(server):
    paragraph, _, _ = " ".join(section(server, "Flags").split()).partition(" are the same")
    named = set(re.findall(r"`(--[a-z-]+)`", paragraph))
    ours = {flag for one in all_commands()["serve"].params for flag in one.opts}

    assert len(named) > 4
    assert named <= ours
    assert named <= PEERS[server]["flags"]


# ── ten minutes ─────────────────────────────────────────────────────────────────────────────────────────────────────


def shell() -> dict[str, str]:
    """The environment of a reader who has Rota on the path."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.long("starts a server for each page, and types what the page says")
@pytest.mark.parametrize("server", PEERS)
def test_the_commands_of_ten_minutes_work_word_for_word(server):
    port = PORTS[server]
    walk = blocks(section(server, "Ten minutes"), "console", "bash", "python")
    (serve,) = (block for block in walk if block.startswith("rota serve"))
    before, after = walk[: walk.index(serve)], walk[walk.index(serve) + 1 :]
    for block in before:
        run_program(["bash", "-c", block], cwd=DOCS.parent, env=shell())
    # Another process may have the page's port here, so the server takes any.
    with started(["bash", "-c", f"{serve.strip()} --port 0"], cwd=DOCS.parent, env=shell()) as program:
        url = line_of(program, "Rota serves ").split()[-1]
        said = [
            run_program(["bash", "-c", block.replace(f"http://127.0.0.1:{port}", url)], cwd=DOCS.parent, env=shell())
            for block in after
        ]
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait() in (0, -signal.SIGINT, 128 + signal.SIGINT)

    assert len(said) > 4
    for block, done in zip(after, said, strict=True):
        assert done.stdout, block
        assert '"error"' not in done.stdout, done.stdout
    asked = next(done.stdout for block, done in zip(after, said, strict=True) if "chat/completions" in block)
    assert json.loads(asked)["choices"][0]["message"]["content"]
