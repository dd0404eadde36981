"""Sentences in code and pages are plain: few pronouns that stand for no noun, no longer than they were, and wrapped."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean

import pytest

from docs.generate.pages import DOCS, TEMPLATES
from docs.generate.wrap import COLUMNS, too_long, wrap

# ── sentences of a project ────────────────────────────────────────────────────────────────────────────────────────────

# A list item or a heading begins a paragraph of its own.
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
_FENCE = re.compile(r"^\s*```")
_LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)")
_URL = re.compile(r"\w+://\S+")
_TAG = re.compile(r"<[^>]*>")
_CODE = re.compile(r"`[^`]*`")
_END = re.compile(r"[.!?]+[\"')*]*(?=\s|$)")
_WORD = re.compile(r"\w")


def mean_sentence(texts: Iterable[str]) -> float:
    """Words in a sentence, on average."""
    lengths = [len(words_of(sentence)) for text in texts for sentence in sentences_of(text)]
    return mean(length for length in lengths if length)


def docs_paragraphs(folder: Path) -> Iterator[str]:
    """Every paragraph of a project's pages; what a template says is in its page."""
    for page in sorted((folder / "docs").rglob("*.md")):
        if page.parent.name != "templates":
            yield from paragraphs(prose_lines(page.read_text("utf-8")))


def src_paragraphs(folder: Path) -> Iterator[str]:
    """Every paragraph of the docstrings and comments in a project's code."""
    for module in sorted((folder / "src").rglob("*.py")):
        yield from code_paragraphs(module.read_text("utf-8"))


def prose_lines(page: str) -> Iterator[str]:
    """The lines of a page in Markdown, each with an empty one in the place of a table's, a heading's or code's."""
    is_code = False
    for line in page.splitlines():
        is_fence = bool(_FENCE.match(line))
        is_code ^= is_fence
        is_prose = not (is_code or is_fence or line.startswith(("|", "#", "<", "    ", "![")))
        yield line if is_prose else ""


def code_paragraphs(module: str) -> Iterator[str]:
    """Docstrings, and comments that stand on lines of their own or behind code."""
    for node in ast.walk(ast.parse(module)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (ast.get_docstring(node) or "").splitlines()
            # An indented line is a drawing or code.
            yield from paragraphs("" if line.startswith("  ") else line for line in lines)
    yield from paragraphs(_comment_lines(module))


def _comment_lines(module: str) -> Iterator[str]:
    """An empty line stands between comments that do not follow each other."""
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(module).readline):
        text = token.string.lstrip("# ")
        if token.type != tokenize.COMMENT or text.startswith(("type:", "noqa", "──", "!")):
            continue
        is_alone = not token.line[: token.start[1]].strip()
        if not is_alone or token.start[0] != last + 1:
            yield ""
        last = token.start[0] if is_alone else 0
        yield text


def paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Lines that belong together, as one text."""
    held: list[str] = []
    for line in lines:
        if held and (not line.strip() or _ITEM.match(line)):
            yield " ".join(held)
            held = []
        if line.strip():
            held.append(_ITEM.sub("", line).strip())
    if held:
        yield " ".join(held)


def sentences_of(text: str) -> list[str]:
    for pattern, plain in ((_CODE, "code"), (_LINK, r"\1"), (_URL, "address"), (_TAG, "")):
        text = pattern.sub(plain, text)
    return _END.split(text)


def words_of(sentence: str) -> list[str]:
    return [word for word in sentence.split() if _WORD.search(word)]


# ── plain words ───────────────────────────────────────────────────────────────────────────────────────────────────────

ROOT = DOCS.parent
PRONOUNS = re.compile(r"\b(whoever|whom|somebody|nobody|everybody|anybody)\b", re.IGNORECASE)
MOST_PRONOUNS = 40
TEXTS = {".py", ".md", ".js", ".css", ".html", ".toml", ".json"}

# What `mean_sentence` gave for commit d9ba411, before the plain words; for both together it was 13.60.
MEAN_SENTENCE_BEFORE = {src_paragraphs: 12.93, docs_paragraphs: 16.44}

PAGES = [ROOT / "README.md", *sorted(page for page in DOCS.rglob("*.md") if TEMPLATES not in page.parents)]


def pronouns_by_file() -> Counter[str]:
    found: Counter[str] = Counter()
    for folder in (ROOT / "src", DOCS):
        for path in folder.rglob("*"):
            if path.suffix in TEXTS and path.is_file():
                found[str(path.relative_to(ROOT))] += len(PRONOUNS.findall(path.read_text("utf-8")))
    return found


def test_pronouns_that_stand_for_no_noun_are_rare_in_code_and_pages():
    found = pronouns_by_file()

    assert found.total() < MOST_PRONOUNS, found.most_common(20)


@pytest.mark.parametrize("paragraphs_of", MEAN_SENTENCE_BEFORE, ids=lambda function: function.__name__)
def test_sentences_in_code_and_pages_are_no_longer_than_they_were(paragraphs_of):
    assert mean_sentence(paragraphs_of(ROOT)) <= MEAN_SENTENCE_BEFORE[paragraphs_of]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_wrapped(page):
    assert too_long(page.read_text("utf-8")) == []


def test_a_sentence_is_measured_without_tables_code_and_addresses():
    page = "# Title\n\nOne two\nthree. Four `a b c` [six](far/away.md)!\n\n| a | b |\n\n```\ncode here\n```\n- Seven.\n"
    sentences = [sentence for text in paragraphs(prose_lines(page)) for sentence in sentences_of(text)]

    assert [len(words_of(sentence)) for sentence in sentences if words_of(sentence)] == [3, 3, 1]


def test_docstrings_and_comments_are_measured():
    module = '"""One two three."""\nx = 1  # four five six\n\n# Seven eight\n# nine.\n# noqa\n'

    assert [len(words_of(text)) for text in code_paragraphs(module)] == [3, 3, 3]


# ── wrapped prose ─────────────────────────────────────────────────────────────────────────────────────────────────────

WORDS = "word " * 40


def test_a_long_paragraph_is_wrapped_and_keeps_its_words():
    wrapped = wrap(WORDS)

    assert wrapped.split() == WORDS.split()
    assert max(map(len, wrapped.splitlines())) <= COLUMNS


def test_the_lines_of_a_list_item_begin_where_its_text_begins():
    _, *others = wrap(f"- {WORDS}").splitlines()

    assert others
    assert all(line.startswith("  word") for line in others)


def test_tables_code_and_headings_stay_as_they_are():
    page = f"# {WORDS}\n\n| {WORDS} |\n\n```\n{WORDS}\n```\n\n    {WORDS}\n"

    assert wrap(page) == page
    assert too_long(page) == []


def test_a_paragraph_that_is_short_enough_stays_as_it_is():
    assert wrap("one\ntwo\n") == "one\ntwo\n"


def test_a_link_is_not_broken_and_its_address_does_not_count():
    link = f"[a link of words]({'x' * 200})"

    assert link in wrap(f"{WORDS}{link} {WORDS}")
    assert too_long(link) == []
    assert too_long(WORDS) == [WORDS]
