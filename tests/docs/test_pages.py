"""The pages that are made from the code are current, and leave nothing out."""

from __future__ import annotations

import re

import pytest

from docs.generate.commands import all_commands
from docs.generate.figures import SHOWN_IN, figures, with_figures
from docs.generate.pages import DOCS, PAGES, page
from docs.generate.routes import all_routes
from rota.server.errors import ERROR_KINDS


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_the_code_says(name):
    assert (DOCS / name).read_text("utf-8") == page(name), f"docs/{name} is not current: `make docs` writes it anew"


@pytest.mark.parametrize("path", SHOWN_IN, ids=lambda path: path.name)
def test_a_page_with_figures_has_those_of_the_kept_results(path):
    text = path.read_text("utf-8")

    assert figures() in text
    assert with_figures(text) == text, f"{path.name} is not current: `make docs` writes it anew"


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    """The text of docs/serving.md under each of its headings, subsections included."""
    parts = re.split(r"^(#+) (.+)$", page("serving.md"), flags=re.MULTILINE)[1:]
    found: dict[str, str] = {}
    above: dict[str, int] = {}
    for marks, title, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        above = {name: level for name, level in above.items() if level < len(marks)} | {title: len(marks)}
        for name in above:
            found[name] = found.get(name, "") + text
    return found


@pytest.mark.parametrize("name", all_commands())
def test_every_flag_of_a_command_is_in_its_section_or_in_one_that_it_names(sections, name):
    section = sections[f"rota {name}"]
    shown = section + "".join(sections[title] for title in re.findall(r"\[(\w+)\]\(#\w+\)", section))

    flags = [flag for one in all_commands()[name].params for flag in (*one.opts, *one.secondary_opts)]
    flags = [flag for flag in flags if flag.startswith("--") and flag != "--help"]
    assert flags
    assert [flag for flag in flags if not re.search(rf"`{flag}[ `]", shown)] == []


def test_every_route_has_a_section_and_a_sentence(sections):
    shown = {path for title in sections for path in re.findall(r"^`[A-Z]+ (.+)`$", title)}

    assert shown == {path.split(" ")[-1].replace(":path}", "}") for path in all_routes()}
    for path, route in all_routes().items():
        assert route.handler.__doc__, f"{path} has no sentence: give its function a docstring"


def test_every_fault_is_in_the_table(sections):
    for code, kind in ERROR_KINDS.items():
        assert f"| {kind.status} | `{code}` |" in sections["Errors"]
