"""SGLang's bodies with weights are read in pieces, and mean what a parser of all of them would find."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from rota.core.errors import RequestError
from rota.server.adapters import upload
from rota.server.adapters.upload import PIECE, WEIGHTS_FILE, TensorsFields, read_tensors, write_tensors
from rota.server.calls.fields import read_body
from tests.server.versions.serving import weights

TEXT = base64.b64encode(bytes(range(256))).decode()
BODY = {"lora_name": "poet", "config_dict": {"r": 8}, "serialized_tensors": TEXT}
WRITTEN = json.dumps(BODY)


@pytest.mark.parametrize(
    "raw",
    [
        WRITTEN,
        json.dumps(dict(reversed(BODY.items()))),
        json.dumps(BODY, indent=2),
        WRITTEN.replace('"serialized_tensors": ', '"serialized_tensors" :\n'),
        json.dumps(BODY, separators=(",", ":")),
        WRITTEN.replace("/", r"\/"),
        WRITTEN.replace('{"r": 8}', '{"serialized_tensors": "inner"}'),
        WRITTEN.replace("poet", "serialized_tensors"),
        WRITTEN.replace("poet", r"\"serialized_tensors\""),
        WRITTEN.replace('{"lora', '{"serialized_tensors": "first", "lora'),
        WRITTEN.replace(TEXT, ""),
    ],
)
def test_however_a_body_is_written_its_fields_and_its_text_are_those_of_a_parser(raw):
    expected = read_body(TensorsFields, raw.encode())
    fields, text = read_tensors(raw.encode())

    assert bytes(text).decode() == expected.serialized_tensors
    assert fields.model_copy(update={"serialized_tensors": ""}) == expected.model_copy(
        update={"serialized_tensors": ""}
    )


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "no JSON",
        WRITTEN[:-1],
        WRITTEN[:-2],
        '{"serialized_tensors"',
        '{"serialized_tensors": "',
        json.dumps({**BODY, "serialized_tensors": None}),
        json.dumps({**BODY, "serialized_tensors": 7, "rid": "a"}),
        json.dumps({**BODY, "extra": 1}),
        json.dumps({"lora_name": "poet", "config_dict": {"serialized_tensors": TEXT}}),
        json.dumps({"lora_name": "poet", "serialized_tensors": TEXT}),
    ],
)
def test_a_body_that_a_parser_refuses_is_refused_for_the_same_field(raw):
    with pytest.raises(RequestError) as expected:
        read_body(TensorsFields, raw.encode())
    with pytest.raises(RequestError) as refused:
        read_tensors(raw.encode())
    assert refused.value.fault.param == expected.value.fault.param


def test_the_parser_gets_the_body_without_the_weights(monkeypatch):
    seen = []
    monkeypatch.setattr(upload, "read_body", lambda kind, raw: seen.append(len(raw)) or read_body(kind, raw))
    text = "A" * 3 * PIECE
    _, found = read_tensors(json.dumps({**BODY, "serialized_tensors": text}).encode())

    assert len(found) == len(text)
    assert seen == [len(WRITTEN) - len(TEXT)]


@pytest.mark.parametrize("size", [64, PIECE // 4 * 3 - 100, 3 * PIECE, 3 * PIECE + 4])
def test_weights_are_decoded_whatever_their_size(tmp_path: Path, size):
    content = weights(size=size)
    assert write_tensors(tmp_path, memoryview(base64.b64encode(content)), {}) == len(content)
    assert (tmp_path / WEIGHTS_FILE).read_bytes() == content


@pytest.mark.parametrize(
    "text",
    [
        "no base64",
        "AAA",
        "A===",
        "A" * (PIECE - 4) + "AA==" + "AAAA",  # which ends at the border of two pieces
        "A" * PIECE + "A",
        "A" * PIECE + "AA\n==",
    ],
)
def test_what_is_no_base64_is_refused_by_the_name_of_its_field(tmp_path: Path, text):
    with pytest.raises(RequestError, match="serialized_tensors must be safetensors in base64"):
        write_tensors(tmp_path, memoryview(text.encode()), {})
