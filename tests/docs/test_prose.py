"""What pages name is there: files, flags, metrics, log lines, exit codes, tests and words."""

from __future__ import annotations

import dataclasses
import io
import keyword
import re
import shlex
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import yaml
from peft import LoraConfig

from docs.generate.commands import all_commands
from docs.generate.pages import DOCS, TEMPLATES
from rota.bench.config import BenchConfig
from rota.commands.flags import spread_lists
from rota.commands.foreign import translated
from rota.core.config import ServerConfig
from rota.core.errors import ConfigError, EngineLostError
from rota.core.options import options_of
from rota.engine.lora.files.peft_config import REFUSED
from rota.llm.config import ENGINE_CONFIGS
from rota.observe.metric_table import METRICS
from rota.runtime.timeouts import EngineTimeouts
from tests.docs.fences import blocks

# ── links and commands ────────────────────────────────────────────────────────────────────────────────────────────────

ROOT = DOCS.parent
ELSEWHERE = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
PAGES = sorted([*ELSEWHERE, *(page for page in DOCS.rglob("*.md") if TEMPLATES not in page.parents)])


def commands_of(page: Path) -> list[str]:
    lines = "".join(blocks(page.read_text("utf-8"), "console", "bash", "sh")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("rota ")]


@pytest.mark.parametrize(
    "command", [pytest.param(line, id=f"{page.name}: {line[:60]}") for page in PAGES for line in commands_of(page)]
)
def test_a_command_in_a_page_has_flags_that_exist(command):
    words, _ = translated(shlex.split(command, comments=True)[1:])
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


# ── the page for operators ────────────────────────────────────────────────────────────────────────────────────────────

OPERATING = (DOCS / "operating.md").read_text("utf-8")
SOURCES = "".join(path.read_text("utf-8") for path in sorted((DOCS.parent / "src/rota").rglob("*.py")))


def test_every_metric_of_the_page_exists():
    named = set(re.findall(r"`((?:rota|process)_[a-z_]+)`", OPERATING))

    assert len(named) > 12
    assert named <= {metric.name for metric in METRICS}


def test_every_flag_of_the_page_is_one_of_serve():
    named = set(re.findall(r"`(--[a-z-]+)", OPERATING))
    flags = {flag for one in all_commands()["serve"].params for flag in one.opts}

    assert len(named) > 8
    assert named <= flags


def test_every_log_line_of_the_page_is_written_somewhere():
    lines = re.findall(r"^\| (?:warning|error) \| `([^`]+)` \|", OPERATING, re.M)

    assert len(lines) == 14
    assert [line for line in lines if f'"{line}"' not in SOURCES] == []


def test_the_exit_codes_are_those_of_the_errors():
    codes = {int(code) for code in re.findall(r"^\| (\d+) \| ", OPERATING, re.M)}

    assert codes == {0, 1, ConfigError.exit_code, EngineLostError.exit_code}


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (r"`--engine-silence-s` \((\d+)\)", ServerConfig().engine_silence_s),
        (r"`--drain-timeout` seconds \((\d+)\)", ServerConfig().drain_timeout),
        (r"must end within (\d+) minutes", EngineTimeouts().start_s / 60),
    ],
)
def test_the_page_says_the_defaults(words, value):
    (said,) = re.findall(words, " ".join(OPERATING.split()))

    assert float(said) == value


def test_the_probes_wait_as_long_as_the_server_may_take():
    (block,) = blocks(OPERATING, "yaml")
    probes = yaml.safe_load(block)
    startup = probes["startupProbe"]

    assert startup["periodSeconds"] * startup["failureThreshold"] >= EngineTimeouts().start_s
    assert probes["terminationGracePeriodSeconds"] > ServerConfig().drain_timeout
    assert probes["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert {probes[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness")} == {"/readyz"}


# ── the threat model ──────────────────────────────────────────────────────────────────────────────────────────────────

SECURITY = (DOCS / "security.md").read_text("utf-8")


def test_every_test_that_the_threat_model_names_is_there():
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", SECURITY))

    assert len(named) > 30
    assert sorted(name for name in named if not (DOCS.parent / name).exists()) == []


def test_every_wall_names_a_test():
    _, _, rest = SECURITY.partition("## What is defended")
    rows = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")][2:]

    assert len(rows) > 15
    assert [row for row in rows if "`tests/" not in row] == []


# ── the table of PEFT's features ──────────────────────────────────────────────────────────────────────────────────────

PROJECT = Path(__file__).parents[2]
TESTS = PROJECT / "tests" / "engine" / "lora"
# PEFT itself, or what the tests of adapters make with it.
WITH_PEFT = re.compile(r"^from peft import|\b(load_with_peft|make_adapter|assert_answers_as_peft)\(", re.MULTILINE)
# What is no setting of the adapter's: the model it was trained from.
NO_ROW = {"base_model_name_or_path"}


def rows() -> list[tuple[str, str, str]]:
    page = (PROJECT / "docs" / "adapters.md").read_text("utf-8")
    table = page.split("### The table")[1].split("\n\n")[1].splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in table]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_names_tests_against_peft_that_have_its_fields(row):
    fields, _, named = row
    files = [TESTS / name for name in re.findall(r"`(test_\w+\.py)`", named)]
    assert files, "no test is named"
    texts = [path.read_text("utf-8") for path in files]
    assert all(WITH_PEFT.search(text) for text in texts)
    known = "\n".join([*texts, *(REFUSED if "test_peft_config.py" in named else ())])
    for word in re.findall(r"`([\w-]+)…?`", fields):
        assert re.search(rf"\b{word}", known, re.IGNORECASE), f"{named} does not have {word}"


def test_every_field_of_peft_has_a_row():
    words = {word for fields, _, _ in rows() for word in re.findall(r"`(\w+)`", fields)}
    assert {field.name for field in dataclasses.fields(LoraConfig)} - NO_ROW - words == set()


# ── the glossary ──────────────────────────────────────────────────────────────────────────────────────────────────────

PACKAGE = DOCS.parent / "src/rota"
GLOSSARY = (DOCS / "glossary.md").read_text("utf-8")
# - **word**: A sentence or two. (`where/it/lives.py`)
ENTRIES = re.findall(r"^- \*\*([^*]+)\*\*: (.+?) \(`([^`]+)`\)$", " ".join(GLOSSARY.split("\n  ")), re.M)


@cache
def words_of(module: Path) -> frozenset[str]:
    """The words that the names in a module are made of, its own name included: `SlotLedger` has slot and ledger."""
    tokens = tokenize.generate_tokens(io.StringIO(module.read_text("utf-8")).readline)
    names = {token.string for token in tokens if token.type == tokenize.NAME} - {*keyword.kwlist} | {module.stem}
    return frozenset(word.lower() for name in names for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name))


def test_every_entry_is_a_word_a_sentence_and_a_place():
    assert len(ENTRIES) == len(re.findall(r"^- ", GLOSSARY, re.M))
    assert [word for word, meaning, _ in ENTRIES if not meaning.endswith((".", "?", '".'))] == []


def test_every_word_is_there_once():
    assert [word for word, count in Counter(word for word, _, _ in ENTRIES).items() if count > 1] == []


@pytest.mark.parametrize(("word", "place"), [(word, place) for word, _, place in ENTRIES])
def test_a_word_is_part_of_a_name_where_the_glossary_says_it_lives(word, place):
    there = words_of(PACKAGE / place)
    missing = [part for part in word.lower().split() if part != "and" and not {part, f"{part}s"} & there]
    assert not missing, f"no name in {place} has {missing} of '{word}'"
