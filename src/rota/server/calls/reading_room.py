"""A body is read where its size says: on the event loop, in a thread, or in the reading room.

Reading a body means: parse it, check its fields, render its conversation and make tokens. All but the last step hold
the interpreter's lock, so a thread does not help against large bodies: the tokens of other clients would wait.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rota.core.errors import Fault, FaultCode, ModelError, RequestError
from rota.core.grammar import Grammar
from rota.grammar.check import problem
from rota.grammar.grammars import Vocabulary
from rota.runtime.room.job import JobOutcome, JobReply, Kind, QueueBounds
from rota.runtime.room.room import FullError, Room
from rota.server.access.keys import ANYONE, Key
from rota.server.calls.call import AskedModels
from rota.server.calls.known_fields import UnknownFields, UnknownMode
from rota.server.calls.prompts import TextLimits, Texts
from rota.server.errors import RetryLater
from rota.text.speech import AS_THE_TEMPLATE_SAYS, ParserNames
from rota.text.tokenizer import Tokenizer

# ── reading room ────────────────────────────────────────────────────────────────────────────────────────────────────
# The server's reading room: large bodies are read there, and grammars are tried, each once.

# More would take cores from the engine. One key never holds all, and texts leave one to grammars.
PROCESSES = 3
# Verdicts are kept by the digests of their grammars, so they are small.
KEPT = 4096
_RETRY_AFTER_S = 1

Result = TypeVar("Result")
Digest = bytes


class Tools:
    """What a process of the room has at hand."""

    def __init__(self, needed: tuple[Path, bool]) -> None:
        """`needed`: the model's folder, and whether grammars are checked."""
        folder, has_grammars = needed
        self.tokenizer = Tokenizer(folder)
        self.vocabulary: Vocabulary | str = ""  # or why there are no grammars
        try:
            if has_grammars:
                self.vocabulary = Vocabulary(self.tokenizer, self.tokenizer.ids)
        except ModelError as error:
            self.vocabulary = str(error)


def read_text(tools: Tools, order: bytes, raw: bytes) -> bytes:
    """What `ReadingRoom.read` asks for. Its work travels by its name."""
    work, limits, parsers, unknown = pickle.loads(order)
    try:
        found: Any = work(Texts(tools.tokenizer, limits, parsers, UnknownFields(unknown)), raw)
    except RequestError as error:
        found = error.fault
    return pickle.dumps(found, pickle.HIGHEST_PROTOCOL)


def check_grammar(tools: Tools, text: bytes) -> bytes:
    if isinstance(tools.vocabulary, str):
        return tools.vocabulary.encode()
    return problem(tools.vocabulary, Grammar(text.decode())).encode()


# The largest body of messages takes some seconds, and many on a busy machine. Many clients may send long prompts at the
# same moment, so the bounds are wide. A body lies in memory while it waits.
TEXT = Kind(
    work=read_text, wall_s=60.0, spares=1, of_key=QueueBounds(128, 64 << 20), of_all=QueueBounds(1024, 512 << 20)
)
# An engine reads the grammar again, so a grammar may not cost it much. The client shall have an answer within a second.
GRAMMAR = Kind(
    work=check_grammar, wall_s=0.8, cpu_s=0.25, of_key=QueueBounds(32, 2 << 20), of_all=QueueBounds(256, 16 << 20)
)


class ReadingRoom:
    """Lives on the event loop. Its processes read the tokenizer of the model's folder."""

    def __init__(
        self,
        folder: Path,
        has_grammars: bool = True,
        processes: int = PROCESSES,
        text: Kind | None = None,
        grammar: Kind | None = None,
    ) -> None:
        self._text, self._grammar = text or TEXT, grammar or GRAMMAR
        self._room = Room(Tools, (folder, has_grammars), processes, ANYONE.name)
        self._asked: dict[Digest, asyncio.Task[str]] = {}
        # What is wrong with a grammar. The one that was asked for last is at the end.
        self._known: OrderedDict[Digest, str] = OrderedDict()

    @property
    def pids(self) -> list[int]:
        return self._room.pids

    def start(self) -> None:
        """Make a process ready in the background, so that the first large body or grammar does not wait for it."""
        self._room.start()

    async def close(self) -> None:
        """End all processes. Calls that wait are refused, because the server is stopping."""
        await asyncio.to_thread(self._room.close)

    async def read(
        self,
        key: Key,
        work: Callable[[Texts, bytes], Result],
        limits: TextLimits,
        raw: bytes,
        parsers: ParserNames = AS_THE_TEMPLATE_SAYS,
        unknown: UnknownMode = "auto",
    ) -> Result:
        """What `work` makes of a body, in another process. Raises RequestError if it is refused, or cannot wait."""
        order = pickle.dumps((work, limits, parsers, unknown))
        reply = await self._reply(key.name, self._text, "large bodies", order, raw)
        if reply.outcome is JobOutcome.OVERDUE:
            message = f"Reading the body took longer than {self._text.wall_s:g} seconds; send a smaller body."
            raise RequestError(Fault(FaultCode.BODY_TOO_LARGE, message))
        if reply.outcome is JobOutcome.TOO_LARGE:
            message = "Reading the body took too much memory; send a smaller body."
            raise RequestError(Fault(FaultCode.BODY_TOO_LARGE, message))
        if reply.outcome is not JobOutcome.DONE:
            message = "The process that read the body died; try again, or send a smaller body."
            raise RequestError(Fault(FaultCode.TEXT_WORKER_DIED, message))
        found: Any = pickle.loads(reply.content)
        if isinstance(found, Fault):
            raise RequestError(found)
        result: Result = found
        return result

    async def check(self, grammar: Grammar, key: str) -> None:
        """Raises RequestError for a grammar that no answer can follow, or that cannot be checked in time."""
        digest = blake2b(grammar.text.encode(), digest_size=16).digest()
        problem = self._known.get(digest)
        if problem is None:
            asked = self._asked.get(digest)
            if asked is None:
                asked = self._asked[digest] = asyncio.create_task(self._verdict(grammar.text, digest, key))
            problem = await asyncio.shield(asked)  # it goes on for others if this caller leaves
        else:
            self._known.move_to_end(digest)
        if problem:
            raise RequestError.bad_field(grammar.param, f"{grammar.param} cannot be followed: {problem}")

    async def _verdict(self, text: str, digest: Digest, key: str) -> str:
        """What is wrong with a grammar. All who ask about it wait for the same task."""
        try:
            reply = await self._reply(key, self._grammar, "grammars", text.encode())
            if reply.outcome in (JobOutcome.OVERDUE, JobOutcome.DIED):
                took = f"took longer than {self._grammar.wall_s:g} seconds"
                what = took if reply.outcome is JobOutcome.OVERDUE else "ended with the process that made it"
                message = f"The check of a grammar {what}; try again, or make the grammar smaller."
                raise RetryLater(Fault(FaultCode.TEXT_WORKER_DIED, message), _RETRY_AFTER_S)
            found = {
                JobOutcome.TOO_LONG: f"it takes more than {self._grammar.cpu_s:g} seconds of processor time to read. "
                "Make it smaller.",
                JobOutcome.TOO_LARGE: "it takes too much memory to read. Make it smaller.",
            }.get(reply.outcome, reply.content.decode())
            self._known[digest] = found
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
            return found
        finally:
            del self._asked[digest]

    async def _reply(self, key: str, kind: Kind, what: str, *parts: bytes) -> JobReply:
        try:
            reply = await asyncio.wrap_future(self._room.submit(key, kind, *parts))
        except FullError:
            message = f"Too many {what} wait to be read; try again in a second."
            raise RetryLater(Fault(FaultCode.QUEUE_FULL, message), _RETRY_AFTER_S) from None
        if reply.outcome is JobOutcome.STOPPING:
            raise RequestError(Fault(FaultCode.STOPPING, "The server is stopping and takes no more requests."))
        if reply.outcome is JobOutcome.FAILED:
            raise RuntimeError(f"a job of the reading room failed:\n{reply.content.decode()}")
        return reply


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────

Read = TypeVar("Read", bound="NamesModels")
# A function of a module, so that another process finds it by its name. Its result is small, or bytes.
Work = Callable[[Texts, bytes], Read]


class NamesModels(Protocol):
    """What is read of a body that names models."""

    @property
    def asked_models(self) -> AskedModels:
        """The models that it names."""
        ...


# Up to this size a body is read on the event loop, in at most 2 ms, because a thread would cost more.
INLINE_BYTES = 4096
# A short body with this field may hold hundreds of words, and each takes 50 µs to tokenize.
SLOW_FIELD = b'"bad_words"'
# Above this size, or with more objects than this, a body goes to the reading room. Reading the largest body below
# holds the interpreter's lock for about 2 ms, mostly for its messages; its tokens are made without the lock.
LARGE_BYTES = 32 * 1024
LARGE_OBJECTS = 64


def is_large(raw: bytes) -> bool:
    return len(raw) > LARGE_BYTES or raw.count(b"{") > LARGE_OBJECTS


async def read(texts: Texts, room: ReadingRoom | None, key: Key, work: Work[Read], raw: bytes) -> Read:
    """Read a body. Raises RequestError if it is refused, or if too many large bodies wait."""
    if room is not None and is_large(raw):
        return await room.read(key, work, texts.limits, raw, texts.parsers, texts.unknown.mode)
    if len(raw) <= INLINE_BYTES and SLOW_FIELD not in raw:
        return work(texts, raw)
    return await asyncio.to_thread(work, texts, raw)
