"""The page about the library: its examples run as they stand there, and no method lacks one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from examples.builtin_adapters.styles import STYLES
from rota import LLM
from tests.docs.fences import blocks
from tests.docs.test_readme import ROOT

PAGE = (ROOT / "docs" / "library.md").read_text("utf-8")


@pytest.fixture(scope="module")
def ran() -> dict[str, Any]:
    """What all examples together have left in their names."""
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for block in blocks(PAGE, "python"):
            exec(block, names)
    return names


def test_its_examples_run_in_their_order_and_the_adapters_speak_as_they_should(ran):
    is_pirate = STYLES["pirate"].check
    said = {name: is_pirate("How do boats float?", ran[name].text) for name in ("plain", "pirate", "sailor")}

    assert said == {"plain": False, "pirate": True, "sailor": True}
    assert ran["sailor"].text == ran["pirate"].text
    assert len({ran["first"].text, ran["second"].text, ran["third"].text}) == 3
    assert [len(ran[name]) for name in ("boat", "ship", "rain")] == [576] * 3


def test_every_method_stands_in_an_example():
    examples = "".join(blocks(PAGE, "python"))
    methods = [name for name, _ in inspect.getmembers(LLM, inspect.isfunction) if not name.startswith("_")]
    assert [name for name in methods if f"llm.{name}(" not in examples] == []
