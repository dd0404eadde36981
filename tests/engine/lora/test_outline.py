"""An outline is made of bytes that anybody may have written: of all else a sentence is made, at once."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from rota.core.errors import AdapterError
from rota.engine.lora.files.outline import Files, FilesOf, Header, Outline, OutlineOf, answer, answered

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
FACTOR = {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}


def outline_of(config: Any = PLAIN, header: Any = None) -> Outline:
    """JSON, or bytes that are to be JSON."""
    parts = [part if isinstance(part, bytes) else json.dumps(part).encode() for part in (config, header or {A: FACTOR})]
    question = OutlineOf("config", parts[0], (Header("weights", parts[1]),), ("model.layers.0.self_attn.q_proj",))
    found = answered(answer, question)
    assert isinstance(found, Outline)
    return found


def refusal(**parts: Any) -> str:
    with pytest.raises(AdapterError) as caught:
        outline_of(**parts)
    return str(caught.value)


def test_a_config_may_be_in_the_metadata_and_one_beside_the_weights_counts_first():
    inside = {"__metadata__": {"adapter_config": json.dumps(PLAIN | {"r": 2})}, A: FACTOR}
    assert outline_of(config=b"", header=inside).config.rank == 2
    assert outline_of(header=inside).config.rank == 4
    assert "no config in the weights' metadata under 'adapter_config'" in refusal(config=b"")
    assert "config cannot be read" in refusal(config=b"", header={"__metadata__": {"adapter_config": "{"}})


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"config": b"[" * 100_000}, "config is nested too deeply"),
        ({"config": b'{"r":' * 100_000}, "config is nested too deeply"),
        ({"header": b"[" * 100_000}, "its header is nested too deeply"),
        ({"config": b'{"r": ' + b"9" * 4000 + b"}"}, "a number of 4000 digits"),
        ({"header": {A: FACTOR | {"shape": [10**17] * 9}}}, "has 9 dimensions"),
        ({"header": {A: FACTOR | {"shape": [4.0, 8]}}}, "needs whole numbers"),
        ({"header": {A: FACTOR | {"data_offsets": [0.0, 128.0]}}}, "needs whole numbers"),
        ({"header": {A: FACTOR | {"data_offsets": [True, 128]}}}, "needs whole numbers"),
        ({"header": {A: FACTOR | {"data_offsets": [-1, 127]}}}, "needs whole numbers"),
        ({"header": {A: FACTOR | {"data_offsets": [0, 1, 2]}}}, "does not say where the tensor"),
        ({"header": {A: FACTOR | {"data_offsets": [0, float("inf")]}}}, "Infinity is no number of JSON"),
        ({"header": {A: {}}}, "does not say where the tensor"),
        ({"header": {A: "F32"}}, "does not say where the tensor"),
        ({"header": {A: FACTOR | {"dtype": ["F32"]}}}, "needs whole numbers"),
        ({"header": b"\xff\xfe"}, "its header cannot be read"),
        ({"config": {"r": "x" * 100_000}}, "'r' must be a whole number"),
        ({"config": {"rank_pattern": {"(": 1}}}, "'(' is no regular expression"),
        ({"config": {"target_modules": "(" * 50_000 + ")" * 50_000}}, "is no regular expression"),
        ({"config": {"target_modules": "a{99999999999999999999}"}}, ""),
        ({"config": PLAIN | {"layers_to_transform": [0], "layers_pattern": ["m|"]}}, ""),
        ({"config": PLAIN | {"bias": "\ud800"}}, "\\ud800"),
        ({"header": {A + "\ud800": FACTOR}}, ""),
        ({"config": PLAIN | {"layers_to_transform": [0]}, "header": {A.replace("0", "9" * 5000): FACTOR}}, ""),
    ],
)
def test_hostile_bytes_are_refused_with_a_short_sentence_at_once(parts, words):
    began = time.process_time()
    sentence = refusal(**parts)
    assert words in sentence
    assert len(sentence) < 1100
    assert time.process_time() - began < 2.0


def test_an_index_names_files():
    found = answered(answer, FilesOf("index", b'{"weight_map": {"a": "two", "b": "one", "c": "two"}}'))
    assert found == Files(("one", "two"))
    spelled = json.dumps({"weight_map": dict(enumerate(["one", "./one", "a/../one", "././one"]))})
    assert answered(answer, FilesOf("index", spelled.encode())) == Files(("one",)), "one file has one name"


@pytest.mark.parametrize("pattern", ["(" * 900 + ")" * 900, "a{99999999999999999999}"])
def test_a_pattern_that_python_cannot_compile_is_refused(pattern):
    with pytest.raises(AdapterError, match="is no regular expression"):
        answered(answer, OutlineOf("", json.dumps(PLAIN | {"target_modules": pattern}).encode(), (), ()))
