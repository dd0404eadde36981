"""An upload is an adapter in a body: safetensors, or SGLang's JSON with base64 in it."""

from __future__ import annotations

import asyncio
import binascii
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from fastapi import Request

from rota.core.errors import DiskError, Fault, FaultCode, RequestError
from rota.runtime.spool import ON_ANOTHER_DISK, Spool
from rota.server.access.keys import Key
from rota.server.adapters.room import MOST_THREADS, KeyRoom
from rota.server.calls.fields import Fields, Unsupported, read_body
from rota.server.door.handover import handover_of

# ── upload ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Safetensors come with PEFT's config beside them or in their metadata.

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# A body that is not the weights alone, until it was read.
BODY_FILE = "body"
# Written at a time, in a thread: a disk may be slow, and the event loop must not wait for it.
WRITTEN_BYTES = 4 << 20

Result = TypeVar("Result")


class Uploads:
    """Receives bodies with weights into the spool; what fails leaves nothing there."""

    def __init__(self, spool: Spool, room: KeyRoom) -> None:
        self._spool, self._room = spool, room
        # Of their own: a client that sends slowly keeps one.
        self._threads = ThreadPoolExecutor(MOST_THREADS, "adapter-bodies")

    @asynccontextmanager
    async def folder(self, key: Key, http: Request) -> AsyncIterator[Path]:
        """A folder in the spool for a key's body, which is removed if the block fails.

        Raises RequestError if the key sends or keeps too much, DiskError if the disk is full or fails.
        """
        with self._room.sending(key):
            try:
                folder = await self.run(self._spool.new_folder)
                try:
                    self._room.reserve(key, str(folder), _announced(http) or 0)
                    yield folder
                except BaseException:  # also CancelledError: nothing may be left behind
                    self._spool.discard(folder)
                    raise
                finally:
                    self._room.release(str(folder))
            except OSError as error:
                raise DiskError.at(str(self._spool.parent), error, ON_ANOTHER_DISK) from error

    async def receive(self, key: Key, http: Request, folder: Path, config: dict[str, Any] | None) -> int:
        """Write the body and the config as PEFT saves them; gives the bytes of the body.

        Raises RequestError for a body that is too large or no safetensors, ClientDisconnect if it ends too early.
        """
        with (folder / WEIGHTS_FILE).open("wb") as file:
            size = await self._copy(key, http, folder, file)
        await self.run(complete, folder, config)
        return size

    async def read(self, key: Key, http: Request, folder: Path, reader: Callable[[bytes], Result]) -> Result:
        """What a reader, which is called in a thread, makes of the whole body."""
        path = folder / BODY_FILE
        with path.open("wb") as file:
            await self._copy(key, http, folder, file)
        return await self.run(lambda: reader(_taken(path)))

    async def _copy(self, key: Key, http: Request, folder: Path, file: BinaryIO) -> int:
        size, waiting = 0, bytearray()
        async for chunk in http.stream():
            size += len(chunk)
            if _announced(http) is None:
                self._room.reserve(key, str(folder), len(chunk))
            waiting += chunk
            if rest := handover_of(http.scope):
                size += await rest.write_to(file, waiting, self._threads)
                waiting = bytearray()
            elif len(waiting) >= WRITTEN_BYTES:
                waiting, full = bytearray(), waiting
                await self.run(file.write, full)
        await self.run(_write_last, file, waiting)
        return size

    async def run(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """In a thread of those that bodies have to themselves."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def _announced(http: Request) -> int | None:
    """The size of a body, unless only its end tells."""
    length = http.headers.get("content-length")
    return None if length is None else int(length)


def _taken(path: Path) -> bytes:
    content = path.read_bytes()
    path.unlink()
    return content


def _write_last(file: BinaryIO, content: bytearray) -> None:
    file.write(content)
    file.flush()  # so that the event loop has nothing to write when it closes the file


def complete(folder: Path, config: dict[str, Any] | None) -> None:
    """Write the config beside the weights; without one, the engine looks for it in their metadata.

    Raises RequestError if the weights are no safetensors. Headers are the client's: none is parsed in this process.
    """
    file = folder / WEIGHTS_FILE
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
    if length + 8 > file.stat().st_size or not length:
        message = (
            "The weights are no safetensors: they do not begin with the length of a header. Send what "
            "safetensors.torch.save gives."
        )
        raise RequestError(Fault(FaultCode.BAD_FIELD, message, "body"))
    if config is not None:
        (folder / CONFIG_FILE).write_text(json.dumps(config), "utf-8")


def parse_config(text: str) -> dict[str, Any]:
    """PEFT's config from JSON. Raises RequestError if it is not an object."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise RequestError.bad_field("config", f"config must be {CONFIG_FILE} as a JSON object.")
    return config


# ── tensors ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Tensors are SGLang's body with weights: JSON with base64 in it, read in pieces, so that no stream waits for it.
#
# A parser would keep the interpreter's lock for the whole of a text of 112 MB, and so would a decoder. So the text is
# cut out of the JSON and decoded piece by piece, and the parser gets what is left.

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
