"""Each row of the table of PEFT features names tests that hold Rota against PEFT, and no field of PEFT lacks a row."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from peft import LoraConfig

from rota.engine.lora.files.peft_config import REFUSED

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "engine" / "lora"
# PEFT itself, or what the tests of adapters make with it.
WITH_PEFT = re.compile(r"^from peft import|\b(load_with_peft|make_adapter|assert_answers_as_peft)\(", re.MULTILINE)
# What is no setting of the adapter's: the model it was trained from.
NO_ROW = {"base_model_name_or_path"}


def rows() -> list[tuple[str, str, str]]:
    page = (ROOT / "docs" / "adapters.md").read_text("utf-8")
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
