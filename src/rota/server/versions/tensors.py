"""Tensors are SGLang's body with weights: JSON with base64 in it, read in pieces, so that no stream waits for it.

A parser would keep the interpreter's lock for the whole of a text of 112 MB, and so would a decoder. So the text is cut
out of the JSON and decoded piece by piece, and the parser gets what is left.
"""

from __future__ import annotations

import binascii
from pathlib import Path
from typing import Any, BinaryIO

from rota.core.errors import Fault, FaultCode, RequestError
from rota.server.fields import Fields, Unsupported, read_body
from rota.server.versions.upload import WEIGHTS_FILE, complete

FIELD = "serialized_tensors"
PICKLED = (
    f"{FIELD} holds a pickle, which can run code when it is read; send base64 of what safetensors.torch.save gives."
)
# Of the text at a time: a millisecond for the decoder. A multiple of four, which is three bytes.
PIECE = 256 << 10
_KEY, _QUOTE, _ESCAPE = f'"{FIELD}"'.encode(), b'"', b"\\"


class TensorsFields(Fields):
    """Weights in the body, in base64, and PEFT's config. Rota takes safetensors and no pickles."""

    lora_name: str
    config_dict: dict[str, Any]
    serialized_tensors: str
    pinned: bool | None = None
    load_format: str | None = None
    added_tokens_config: Unsupported = None
    # Not used: the server gives adapters their ids, and such a call needs no id of its own.
    lora_id: str | None = None
    rid: str | None = None


# The event loop's own process parses these: config and names, and weights of which single characters are escaped.
MOST_REST, MOST_ESCAPED = 4 << 20, 64 << 20


def read_tensors(raw: bytes) -> tuple[TensorsFields, memoryview]:
    """The fields, without the weights, and the text of the weights. Raises RequestError as `read_body`."""
    begin, end = _text_in(raw)
    rest = raw[:begin] + raw[end:]
    if len(rest) > (MOST_REST if begin < end else MOST_ESCAPED):
        message = f"The fields beside {FIELD} are too large, or it is written with escapes."
        raise RequestError(Fault(FaultCode.BODY_TOO_LARGE, message))
    if begin < end and rest.count(_KEY) == 1:
        return read_body(TensorsFields, rest), memoryview(raw)[begin:end]
    fields = read_body(TensorsFields, raw)
    return fields, memoryview(fields.serialized_tensors.encode())


def _text_in(raw: bytes) -> tuple[int, int]:
    """Where the text of the field lies, if it is written without escapes; else nowhere."""
    begin = raw.find(_QUOTE, raw.find(_KEY) + len(_KEY)) + 1
    if _KEY not in raw[:begin] or raw[:begin].rsplit(_KEY, 1)[1].split() not in ([b":", _QUOTE], [b":" + _QUOTE]):
        return 0, 0
    for at in range(begin, len(raw), PIECE):
        if (end := raw.find(_QUOTE, at, at + PIECE)) >= 0:
            return (0, 0) if raw.find(_ESCAPE, at, end) >= 0 else (begin, end)
        if raw.find(_ESCAPE, at, at + PIECE) >= 0:
            break
    return 0, 0


def write_tensors(folder: Path, text: memoryview, config: dict[str, Any]) -> int:
    """Write the weights and the config as PEFT saves them; gives the bytes of the weights.

    Raises RequestError for what is no base64, or holds no safetensors.
    """
    with (folder / WEIGHTS_FILE).open("wb") as file:
        try:
            size = sum(
                _decode(file, text[at : at + PIECE], len(text) - at > PIECE) for at in range(0, len(text), PIECE)
            )
        except binascii.Error:
            raise RequestError.bad_field(FIELD, f"{FIELD} must be safetensors in base64.") from None
    try:
        complete(folder, config)
    except RequestError as error:
        with (folder / WEIGHTS_FILE).open("rb") as file:
            is_pickle = file.read(1) == b"\x80"
        raise RequestError.bad_field(FIELD, PICKLED if is_pickle else error.fault.message) from None
    return size


def _decode(file: BinaryIO, piece: memoryview, has_more: bool) -> int:
    content = binascii.a2b_base64(piece, strict_mode=True)
    if has_more and len(content) != PIECE // 4 * 3:
        raise binascii.Error("the text ends before its end")
    return file.write(content)
