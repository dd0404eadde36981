"""What pages name is there: the files they link to, and the flags of the commands they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from docs.generate.commands import all_commands
from docs.generate.pages import DOCS, TEMPLATES
from rota.bench.config import BenchConfig
from rota.commands.flags import spread_lists
from rota.core.options import options_of
from rota.llm.config import ENGINE_CONFIGS
from tests.docs.fences import blocks

ROOT = DOCS.parent
ELSEWHERE = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
OWN = [page for page in ELSEWHERE if "node_modules" not in page.parts]
PAGES = sorted([*OWN, *(page for page in DOCS.rglob("*.md") if TEMPLATES not in page.parents)])


def commands_of(page: Path) -> list[str]:
    lines = "".join(blocks(page.read_text("utf-8"), "console", "bash", "sh")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("rota ")]


@pytest.mark.parametrize(
    "command", [pytest.param(line, id=f"{page.name}: {line[:60]}") for page in PAGES for line in commands_of(page)]
)
def test_a_command_in_a_page_has_flags_that_exist(command):
    words = shlex.split(command, comments=True)[1:]
    name = next(name for name in all_commands() if words[: len(name.split())] == name.split())
    given = spread_lists(words[len(name.split()) :], options_of(*ENGINE_CONFIGS, BenchConfig).values())

    all_commands()[name].make_context(name, given)  # raises if it cannot be


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_that_are_there(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)|src=\"([^\"]+)\"", page.read_text("utf-8"))
    targets = [first or second for first, second in links if "://" not in first + second]

    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_a_page_lead_to_headings_that_are_there(page):
    text = page.read_text("utf-8")
    headings = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)
    }

    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings


def test_twelve_files_are_to_be_read_first():
    _, _, text = (DOCS / "architecture.md").read_text("utf-8").partition("### Read these twelve files first")
    files = re.findall(r"^\d+\. \[`([^`]+)`\]\(\.\./src/rota/([^)]+)\)", text.partition("\n## ")[0], re.M)

    assert len(files) == 12
    assert all(shown == linked for shown, linked in files)
