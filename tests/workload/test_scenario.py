"""A scenario file is read, or a sentence names the file, the client and the field that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.core.errors import ConfigError
from rota.workload.scenario import read_scenario

# What TOML can write, and of which type of field it may be a value.
VALUES = {
    '"six"': "a text",
    "7": "a whole number",
    "0.5": "a number",
    "true": None,
    "[1, 2]": "two whole numbers",
    "[]": None,
    "[1, 2, 3]": None,
    '["a", "b"]': None,
    "[0.5, 1.5]": None,
    "{ a = 1 }": None,
    "1979-05-27": None,
}
SCENARIO_FIELDS = {
    "name": "a text",
    "about": "a text",
    "slots": "a whole number",
    "max_running_requests": "a whole number",
    "kv_blocks": "a whole number",
    "transients": "a whole number",
    "transient_every_s": "a number",
    "transient_stays_s": "a number",
    "transient_requests": "a whole number",
    "context_length": "a whole number",
    "max_loaded_loras": "a whole number",
    "fetch_s": "a number",
}
CLIENT_FIELDS = {
    "requests": "a whole number",
    "rate_per_s": "a number",
    "concurrency": "a whole number",
    "prompt_tokens": "two whole numbers",
    "output_tokens": "two whole numbers",
    "adapters": "a whole number",
    "distribution": "a text",
    "zipf_exponent": "a number",
    "skew": "a number",
    "base_share": "a number",
    "cancel_share": "a number",
    "cancel_within_s": "a number",
    "burst": "a whole number",
    "priority": "a whole number",
    "shared_prefix_tokens": "a whole number",
    "max_tokens": "a whole number",
}


def refusal(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_scenario(path)
    return str(error.value)


def others_than(kind: str) -> list[str]:
    """Values that a field of this kind cannot have; a whole number is a number too."""
    return [text for text, its in VALUES.items() if its != kind and (kind, its) != ("a number", "a whole number")]


@pytest.mark.parametrize("name", SCENARIO_FIELDS)
def test_a_value_of_another_type_is_named_with_its_file_and_field(tmp_path, name):
    path, kind = tmp_path / "day.toml", SCENARIO_FIELDS[name]
    for value in others_than(kind):
        text = f"{name} = {value}\n[[clients]]\nrequests = 1\nrate_per_s = 1.0\n"
        assert refusal(path, text).startswith(f"{path}: {name} must be {kind}, "), value


@pytest.mark.parametrize("name", CLIENT_FIELDS)
def test_a_client_s_value_of_another_type_is_named_with_the_client_s_number(tmp_path, name):
    path, kind = tmp_path / "day.toml", CLIENT_FIELDS[name]
    fine = {"requests": "1", "concurrency": "1"}
    for value in others_than(kind):
        rows = "\n".join(f"{field} = {text}" for field, text in (fine | {name: value}).items())
        text = f"[[clients]]\nrequests = 1\nrate_per_s = 1.0\n[[clients]]\n{rows}\n"
        assert refusal(path, text).startswith(f"{path}, client 2: {name} must be {kind}, "), value


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("requests = -1", "requests must be finite and at least 0"),
        ("concurrency = 0", "concurrency must be finite and at least 1"),
        ("adapters = -1", "adapters must be finite and at least 0"),
        ("base_share = 1.5", "base_share must be between 0 and 1"),
        ("cancel_share = nan", "cancel_share must be between 0 and 1"),
        ("cancel_within_s = inf", "cancel_within_s must be finite and at least 0"),
        ("skew = 0", "skew must be a finite number above 0"),
        ("burst = 0", "burst must be finite and at least 1"),
        ("burst = 2", "burst needs rate_per_s"),
        ("max_tokens = 0", "max_tokens must be finite and at least 1"),
        ("shared_prefix_tokens = -1", "shared_prefix_tokens must be finite and at least 0"),
        ("prompt_tokens = [2, 1]", "prompt_tokens must be [low, high]"),
        ('distribution = "fair"', "distribution must be one of"),
        ("rate_per_s = 2.0", "either rate_per_s or concurrency"),
        ("colour = 1", "'colour' is not a field of client"),
    ],
)
def test_a_client_s_value_that_cannot_be_is_named_too(tmp_path, row, words):
    path, name = tmp_path / "day.toml", row.partition(" ")[0]
    rows = {"requests": "requests = 1", "concurrency": "concurrency = 1"} | {name: row}
    assert refusal(path, "[[clients]]\n" + "\n".join(rows.values())).startswith(f"{path}, client 1: ")
    assert words in refusal(path, "[[clients]]\n" + "\n".join(rows.values()))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no [[clients]]"),
        ("clients = 3", "write [[clients]]"),
        ("clients = ['a']", "write [[clients]]"),
        ("[clients]\nrequests = 1", "write [[clients]]"),
        ("[[clients]]\nrate_per_s = 1.0", "client 1: 'requests' is missing"),
        ("[[clients]]\nrequests = 1\nrate_per_s = 0.0", "rate_per_s must be above 0"),
        ("slots = -1\n[[clients]]\nrequests = 1\nconcurrency = 1", "slots must be finite and at least 0"),
        ("transients = 1\n[[clients]]\nrequests = 1\nconcurrency = 1", "transients are copies of adapters"),
        (
            "transient_every_s = 0\n[[clients]]\nrequests = 1\nconcurrency = 1",
            "transient_every_s must be a finite number",
        ),
        ("weights = [1.0]\n[[clients]]\nrequests = 1\nconcurrency = 1", "one for each of at most 0 adapters"),
        ("weights = [0]\n[[clients]]\nrequests = 1\nconcurrency = 1\nadapters = 1", "weights must be finite numbers"),
        ("weights = ['a']\n[[clients]]\nrequests = 1\nconcurrency = 1", "weights must be a list of numbers"),
        ("weights = 2\n[[clients]]\nrequests = 1\nconcurrency = 1", "weights must be a list of numbers"),
        ("pages = 8\n[[clients]]\nrequests = 1\nconcurrency = 1", "neither is given without the other"),
        ("adapter_pages = [1]\n[[clients]]\nrequests = 1\nconcurrency = 1", "at most pages (0)"),
        ("pages = 4\nadapter_pages = [1, 5]\n[[clients]]\nrequests = 1\nconcurrency = 1", "at most pages (4)"),
        ("adapter_pages = [0.5]\n[[clients]]\nrequests = 1\nconcurrency = 1", "a list of whole numbers"),
        ("slots =", "is not a TOML file"),
    ],
)
def test_what_is_wrong_with_the_whole_is_said_with_the_file(tmp_path, text, words):
    path = tmp_path / "day.toml"
    sentence = refusal(path, text)
    assert sentence.startswith(str(path))
    assert words in sentence


def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="Is a directory"):
        read_scenario(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"about = '\xe9'")
    with pytest.raises(ConfigError, match="not a TOML file"):
        read_scenario(tmp_path / "latin.toml")


def test_a_whole_number_is_a_number(tmp_path):
    path = tmp_path / "day.toml"
    path.write_text("[[clients]]\nrequests = 3\nrate_per_s = 2\nprompt_tokens = [1, 8]\n")
    (client,) = read_scenario(path).clients
    assert (client.rate_per_s, client.prompt_tokens) == (2, (1, 8))


def test_adapters_have_the_weights_of_the_list_and_further_ones_the_weight_1(tmp_path):
    path = tmp_path / "day.toml"
    path.write_text("weights = [1, 2.5]\n[[clients]]\nrequests = 3\nrate_per_s = 2\nadapters = 3\n")
    scenario = read_scenario(path)
    assert [scenario.weight_of(adapter) for adapter in (1, 2, 3)] == [1.0, 2.5, 1.0]


def test_adapters_take_the_pages_of_the_list_and_further_ones_from_its_first_again(tmp_path):
    path = tmp_path / "day.toml"
    path.write_text("pages = 9\nadapter_pages = [1, 8]\n[[clients]]\nrequests = 3\nrate_per_s = 2\nadapters = 3\n")
    scenario = read_scenario(path)
    assert [scenario.pages_of(adapter) for adapter in (1, 2, 3, 4)] == [1, 8, 1, 8]
