"""The sentences of a project: prose of its pages, and docstrings and comments of its code."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean

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
