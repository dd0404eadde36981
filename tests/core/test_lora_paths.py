"""--lora-paths takes three forms, and says what is wrong with a fourth; adapters are listed in words."""

from __future__ import annotations

import pytest

from rota.core.adapter import MOST_LISTED, listed
from rota.core.config import LoraConfig
from rota.core.errors import ConfigError
from rota.core.lora_paths import LoraPath, parse_lora_path, parse_lora_paths
from rota.core.options import build, options_of


@pytest.mark.parametrize(
    ("entry", "parsed"),
    [
        ("/data/adapters/sql", LoraPath(name="sql", path="/data/adapters/sql")),
        ("adapters/sql/", LoraPath(name="sql", path="adapters/sql/")),
        ("my-sql=/data/adapters/sql", LoraPath(name="my-sql", path="/data/adapters/sql")),
        ("org/sql=/data/r=8", LoraPath(name="org/sql", path="/data/r=8")),
        ("./runs/r=8", LoraPath(name="r=8", path="./runs/r=8")),
        (
            '{"lora_name": "sql", "lora_path": "x", "pinned": true, "weight": 2}',
            LoraPath(name="sql", path="x", is_pinned=True, weight=2.0),
        ),
        ('{"lora_path": "x/y"}', LoraPath(name="y", path="x/y")),
    ],
)
def test_an_entry_is_a_path_a_named_path_or_json(entry, parsed):
    assert parse_lora_path(entry) == parsed


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("", "'' has no path; give PATH, NAME=PATH, or JSON"),
        ("sql=", "'sql=' has no path"),
        ("=x", "'=x' has no name"),
        ("/", "'/' has no name"),
        ("{", "is not JSON"),
        ('{"lora_name": "sql"}', "has no path"),
        ('{"lora_name": 3, "lora_path": "x"}', "has no name"),
        ('{"lora_path": "x", "wieght": 2}', "has a field 'wieght'; the fields are lora_name, lora_path"),
        ('{"lora_path": "x", "pinned": 1}', "'pinned' must be true or false, not 1"),
        ('{"lora_path": "x", "weight": 0}', "'weight' must be a finite number above 0, not 0"),
        ('{"lora_path": "x", "weight": NaN}', "'weight' must be a finite number above 0, not nan"),
        ('{"lora_path": "x", "weight": true}', "'weight' must be a finite number above 0, not True"),
    ],
)
def test_an_entry_of_no_form_is_refused(entry, sentence):
    with pytest.raises(ConfigError) as refusal:
        parse_lora_path(entry)

    assert sentence in str(refusal.value)


def test_two_adapters_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two adapters 'sql': a/sql and b/sql; give one of them another name"):
        parse_lora_paths(("a/sql", "b/sql"))

    assert [path.name for path in parse_lora_paths(("a/sql", "other=b/sql"))] == ["sql", "other"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_loras_per_batch": 0}, "max_loras_per_batch must be at least 1, not 0."),
        ({"max_lora_rank": 0}, "max_lora_rank must be at least 1, not 0."),
        ({"max_loaded_loras": 0}, "max_loaded_loras must be at least 1, not 0."),
        ({"lora_memory_share": 1.0}, "lora_memory_share must lie between 0 and 1, not 1.0."),
        ({"max_loras_per_batch": 8, "max_loaded_loras": 4}, "fewer than max_loras_per_batch (8)"),
        ({"lora_paths": ("a/x", "b/x")}, "two adapters 'x'"),
    ],
)
def test_a_config_that_cannot_be_is_refused(fields, sentence):
    with pytest.raises(ConfigError) as refusal:
        LoraConfig(**fields)

    assert sentence in str(refusal.value)


def test_options_take_words_and_lists():
    given = {"max_loras_per_batch": 4, "lora_paths": ["a", "b=c"]}

    assert build(LoraConfig, given) == LoraConfig(max_loras_per_batch=4, lora_paths=("a", "b=c"))
    assert build(LoraConfig, {"max_loras_per_batch": "auto"}) == LoraConfig()
    for name, value, sentence in (
        ("max_loras_per_batch", "many", "max_loras_per_batch must be a whole number or 'auto', not 'many'."),
        ("lora_paths", "a", "lora_paths must be a list, not 'a'."),
        ("lora_paths", [1], "lora_paths must be a text, not 1."),
    ):
        with pytest.raises(ConfigError) as refusal:
            options_of(LoraConfig)[name].check(value)
        assert str(refusal.value) == sentence


# ── in words ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sentence_lists_names_but_never_thousands():
    names = [f"a{number}" for number in range(10_000)]
    assert listed([]) == "none"
    assert listed(names[:MOST_LISTED]) == ", ".join(names[:MOST_LISTED])
    assert listed(names).endswith(f"a{MOST_LISTED - 1} and 9,950 more")
