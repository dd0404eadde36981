"""An outline says what an adapter folder holds, in plain facts, of bytes that a tenant may have written.

All of an adapter's JSON is parsed here, and its patterns and names are matched here. `answer` needs no file, no tensor
and no network, so it can work in a process that is ended when it takes too long.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec

from rota.core.errors import AdapterError, ModelError
from rota.engine.lora.files.peft_config import END_MODULES, PeftConfig, read_config
from rota.engine.model.config_file import ConfigFile

# Far more than PEFT writes: an adapter of every expert of a large model has a header of some megabytes.
LONGEST_CONFIG, LONGEST_HEADER, MOST_FILES = 1 << 20, 16 << 20, 256
LONGEST_HEADERS = 2 * LONGEST_HEADER  # of all files together
# No file is so long, and no tensor has so many dimensions.
MOST_DIGITS, MOST_DIMENSIONS = 18, 8
# A sentence may quote what the file says, which may be long.
LONGEST_REFUSAL = 1000

# PEFT leaves the adapter's name out of its files; a state dict saved as it is has the name.
MODULE = r"base_model\.model\.(?P<module>.+)"
KINDS = {
    "a": re.compile(rf"{MODULE}\.lora_(A(\.[^.]+)?\.weight|embedding_A(\.[^.]+)?)"),
    "b": re.compile(rf"{MODULE}\.lora_(B(\.[^.]+)?\.weight|embedding_B(\.[^.]+)?)"),
    "b_bias": re.compile(rf"{MODULE}\.lora_B(\.[^.]+)?\.bias"),
    "magnitude": re.compile(rf"{MODULE}\.lora_magnitude_vector(\.[^.]+)?(\.weight)?"),
    "bias": re.compile(rf"{MODULE}\.bias"),
    "tokens": re.compile(rf"{MODULE}\.token_adapter\.trainable_tokens_delta(\.[^.]+)?"),
    "base": re.compile(rf"{MODULE}\.base_layer\.weight"),
    # As PEFT saves what `modules_to_save` names: it leaves that word out, a state dict has it.
    "matrix": re.compile(
        rf"base_model\.model\.(?P<module>{'|'.join(map(re.escape, END_MODULES))})(\.modules_to_save(\.[^.]+)?)?\.weight"
    ),
    # What VeLoRA keeps for its backward pass; its forward pass is that of plain factors.
    "training": re.compile(rf"{MODULE}\.lora_velora_embed(\.[^.]+)?"),
}
OTHER = "other"
# In the metadata of safetensors, if the config does not lie beside them.
METADATA_KEY = "adapter_config"


class Header(msgspec.Struct, frozen=True):
    """The header of a safetensors file."""

    place: str
    content: bytes


class OutlineOf(msgspec.Struct, frozen=True, tag=True):
    """Asks for an outline. `modules` are the model's; none: any model's."""

    config_place: str
    config: bytes
    headers: tuple[Header, ...]
    modules: tuple[str, ...]


class FilesOf(msgspec.Struct, frozen=True, tag=True):
    """Asks which files an index names."""

    place: str
    content: bytes


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as its header describes it. The kind and the module are found in its name."""

    name: str
    kind: str
    module: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Outline(msgspec.Struct, frozen=True, tag=True):
    """What a folder holds: the tensors of each file."""

    config: PeftConfig
    files: tuple[tuple[TensorEntry, ...], ...]


class Files(msgspec.Struct, frozen=True, tag=True):
    names: tuple[str, ...]


class HeaderRefusal(msgspec.Struct, frozen=True, tag=True):
    """Why the bytes are not those of an adapter."""

    reason: str


class Inquire(Protocol):
    """Has a question answered, here or in another process."""

    def __call__(self, question: bytes, key: str = "") -> bytes:
        """Raises AdapterError if that takes too long. `key`: whose adapter it is."""
        ...


Question = OutlineOf | FilesOf
Answer = Outline | Files | HeaderRefusal


def answer(question: bytes, key: str = "") -> bytes:  # noqa: ARG001
    """What a question's bytes hold, or why they cannot be understood."""
    try:
        return msgspec.msgpack.encode(_found(msgspec.msgpack.decode(question, type=Question)))
    except (ModelError, re.error, RecursionError, OverflowError, ValueError, TypeError) as error:
        # Names may hold halves of characters, which no text that leaves here can have.
        reason = _shortened(str(error)).encode("utf-8", "backslashreplace").decode()
        return msgspec.msgpack.encode(HeaderRefusal(reason))


def answered(ask: Inquire, question: Question) -> Answer:
    """Raises AdapterError for what is not an adapter's."""
    found = msgspec.msgpack.decode(ask(msgspec.msgpack.encode(question)), type=Answer)
    if isinstance(found, HeaderRefusal):
        raise AdapterError(found.reason)
    return found


def _found(question: Question) -> Answer:
    match question:
        case OutlineOf():
            return _outline(question)
        case FilesOf():
            index = ConfigFile(Path(question.place), parsed(question.place, question.content))
            names = map(str, index.section("weight_map").values())
            return Files(tuple(sorted({os.path.normpath(name) if name else name for name in names})))


def _outline(question: OutlineOf) -> Outline:
    headers = list(map(_parsed_header, question.headers))
    metadata = [header.pop("__metadata__", None) for header in headers]
    values = parsed(question.config_place, question.config or _config_in(question.config_place, metadata))
    files = tuple(
        tuple(_entry(place.place, name, fields) for name, fields in header.items())
        for place, header in zip(question.headers, headers, strict=True)
    )
    there = {entry.module for entries in files for entry in entries if entry.module}
    return Outline(read_config(Path(question.config_place), values, question.modules, there), files)


def _parsed_header(header: Header) -> dict[str, Any]:
    try:
        return parsed("its header", header.content)
    except ModelError as error:
        raise _corrupt(header.place, str(error).removesuffix("; copy it again.")) from error


def _config_in(place: str, metadata: list[Any]) -> bytes:
    for one in metadata:
        if isinstance(one, dict) and isinstance(config := one.get(METADATA_KEY), str):
            return config.encode()
    raise ModelError(
        f"There is no {place}, and no config in the weights' metadata under '{METADATA_KEY}'. Give a folder that PEFT "
        "saved, or send the config with the weights in the query parameter 'config'."
    )


def _entry(place: str, name: str, fields: Any) -> TensorEntry:
    try:
        dtype, shape, (start, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        numbers = [*shape, start, end]
    except (KeyError, TypeError, ValueError):
        raise _corrupt(place, f"its header does not say where the tensor '{name}' lies") from None
    if not isinstance(dtype, str) or any(type(number) is not int or number < 0 for number in numbers):
        raise _corrupt(place, f"the tensor '{name}' needs whole numbers for its shape and its place")
    if len(shape) > MOST_DIMENSIONS:
        raise _corrupt(place, f"the tensor '{name}' has {len(shape)} dimensions")
    for kind, pattern in KINDS.items():
        if found := pattern.fullmatch(name):
            return TensorEntry(name, kind, found["module"].removesuffix(".base_layer"), dtype, tuple(shape), start, end)
    return TensorEntry(name, OTHER, "", dtype, tuple(shape), start, end)


def parsed(place: str, content: bytes) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError, also for what other readers of JSON would take or die of."""
    try:
        values = json.loads(content.decode("utf-8"), parse_int=_whole, parse_constant=_no_number)
    except RecursionError:
        raise ModelError(f"{place} is nested too deeply; copy it again.") from None
    except ValueError as error:
        raise ModelError(f"{place} cannot be read ({error}); copy it again.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{place} holds no JSON object; copy it again.")
    return values


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _corrupt(place: str, why: str) -> ModelError:
    return ModelError(f"{place} is truncated or corrupt: {why}; copy the file again.")


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_REFUSAL else f"{text[:LONGEST_REFUSAL]}…"
