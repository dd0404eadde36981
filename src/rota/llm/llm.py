"""A model as an object: prompts in, completions out, from any thread and any coroutine."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from rota.core.errors import AdapterError, ConfigError, EngineDiedError, RequestError
from rota.core.events import AdapterRefused
from rota.core.ids import RequestId
from rota.core.lora_paths import LoraPath
from rota.core.messages import AddAdapter, Message, RemoveAdapter
from rota.core.options import refuse_unknown
from rota.core.request import Pooling, Request, SamplingParams
from rota.engine.progress import Progress
from rota.llm.asked import (
    Adapters,
    Asked,
    Conversation,
    Messages,
    Params,
    Prompt,
    Prompts,
    Texts,
    check_paths,
    checked_tokens,
    each_adapter,
    each_params,
    listed_conversations,
    listed_prompts,
    paired,
)
from rota.llm.calls import (
    CLOSED,
    Bell,
    Completion,
    Desk,
    LoopBell,
    OpenCall,
    PartialCompletion,
    Piece,
    ThreadBell,
    dead,
)
from rota.llm.config import (
    ENGINE_CONFIGS,
    build_device,
    engine_config,
    first_adapters,
    locate_model,
    locator_for,
    prefix_for,
    release_memory,
    with_first,
)
from rota.runtime.in_process import InProcessService
from rota.runtime.registry import Registry
from rota.runtime.seeds import seeded
from rota.sources.source import NothingError
from rota.text.stream import TextStream
from rota.text.tokenizer import Tokenizer
from rota.text.vectors import scores

# No stream stands still for a step: it may be as large as chunked_prefill_size says, and a minute is long enough.
STEP_MS = 60_000.0
ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0)


class LLM:
    """A model that is loaded once and asked often. Prompts with the same beginning share KV, also across calls.

    Any thread may call it, and coroutines may too. A thread of its own runs the engine, so that what is asked at the
    same time is answered together.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        quiet: bool = False,
        **options: Any,
    ) -> None:
        """Without a model: the built-in model and its adapters. Options are `rota serve`'s flags, with underscores."""
        refuse_unknown(options, *ENGINE_CONFIGS)
        check_paths(model, adapters)
        if model is not None:
            options["model_path"] = str(model)
        # A program's prompts wait for each other without a bound.
        config = engine_config({"max_step_ms": STEP_MS, "max_queued_requests": sys.maxsize, **options}, quiet)
        if config.model.data_parallel_backend == "ray":
            raise ConfigError(
                "data_parallel_backend is 'ray', but an LLM object computes in this process; leave it out."
            )
        if config.model.data_parallel_size != 1:
            raise ConfigError(
                f"data_parallel_size is {config.model.data_parallel_size}, but an LLM object is one copy of the model; "
                "leave it out, or start a server with `rota serve --data-parallel-size`."
            )
        config = locate_model(config)
        wanted = {entry.name: entry for entry in first_adapters(config)}
        wanted |= {name: LoraPath(name=name, path=str(path)) for name, path in (adapters or {}).items()}
        config = with_first(config, wanted.values())
        assert config.model.model_path is not None
        self._quiet = quiet
        self._config = config
        self._prefix = prefix_for(config.lora)
        self._tokenizer = Tokenizer(config.model.model_path)
        self._registry = Registry(Path(config.model.model_path).resolve().name, config.model.model_path)
        self._desk = Desk()
        self._ids = itertools.count()
        # A call finds its adapters and sends its requests in one go: no unload comes between the two.
        self._sending = threading.Lock()
        self._loading = threading.Lock()  # one adapter at a time comes or goes
        self._service = InProcessService(partial(build_device, config), config, CLOSED)
        self._forgotten = weakref.finalize(self, _end, self._service)
        self._service.start(self._desk.deliver)
        try:
            self._wait_until_ready()
            for entry in wanted.values():
                self._load(entry)
        except BaseException:  # Ctrl-C too: the caller has no object to close
            self._forgotten()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End calls that wait, with an error, and return threads, memory and processes. A second time does nothing."""
        self._service.stop()
        release_memory()

    # ── adapters ─────────────────────────────────────────────────────────────────────────────────────────────────

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Read an adapter; prompts can then ask for it by name. Raises AdapterError if it cannot be served."""
        with self._loading:
            self._load(LoraPath(name=name, path=str(path)))

    def _load(self, entry: LoraPath) -> None:
        adapter = self._registry.add(locator_for(self._config.lora).locate(entry))
        try:
            told = self._desk.expect(adapter.adapter_id)
            self._send(AddAdapter(adapter=adapter, at=time.monotonic()))
            if isinstance(outcome := told.result(), AdapterRefused):
                raise AdapterError(outcome.reason)
        except BaseException:  # Ctrl-C too: the name stays free
            self._registry.forget(entry.name)
            with suppress(EngineDiedError):
                self._send(RemoveAdapter(adapter_id=adapter.adapter_id, at=time.monotonic()))
            raise

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter: later calls do not find it. Returns once the calls that use it have ended."""
        with self._loading, self._sending:
            adapter_id = self._registry.forget(name).adapter_id
            told = self._desk.expect(adapter_id)
            self._send(RemoveAdapter(adapter_id=adapter_id, at=time.monotonic()))
        told.result()

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────

    def generate(
        self, prompts: Prompts, params: Params = None, adapter: Adapters = None, n: int = 1
    ) -> list[Completion]:
        """Continue every prompt, each a text or tokens. Raises RequestError if one cannot be served.

        `adapter` names one adapter for all prompts, or a list with one per prompt. None is the base model. With `n`
        each prompt gets so many answers, which stand side by side.
        """
        return completions(self._ended(self._prompted(prompts, params, adapter, n)))

    def chat(self, messages: Messages, params: Params = None, adapter: Adapters = None, n: int = 1) -> list[Completion]:
        """Answer one conversation, or several, through the model's chat template."""
        return completions(self._ended(self._conversed(messages, params, adapter, n)))

    def stream(
        self, prompt: Prompt | Conversation, params: SamplingParams | None = None, adapter: str | None = None
    ) -> Iterator[Piece]:
        """Continue one prompt, or answer one conversation, piece by piece. A loop that is left aborts the rest."""
        return self._pieces(self._one(prompt, params, adapter))

    async def agenerate(
        self, prompts: Prompts, params: Params = None, adapter: Adapters = None, n: int = 1
    ) -> list[Completion]:
        """As `generate`, for asyncio. A task that is cancelled aborts its requests."""
        asked = await asyncio.to_thread(self._prompted, prompts, params, adapter, n)
        return completions(await self._ended_async(asked))

    async def achat(
        self, messages: Messages, params: Params = None, adapter: Adapters = None, n: int = 1
    ) -> list[Completion]:
        """As `chat`, for asyncio."""
        asked = await asyncio.to_thread(self._conversed, messages, params, adapter, n)
        return completions(await self._ended_async(asked))

    async def astream(
        self, prompt: Prompt | Conversation, params: SamplingParams | None = None, adapter: str | None = None
    ) -> AsyncIterator[Piece]:
        """As `stream`, for asyncio."""
        asked = await asyncio.to_thread(self._one, prompt, params, adapter)
        with self._opened(asked, bell := LoopBell(), is_streamed=True) as call:
            while call.is_open:
                await bell.wait_for_ring()
                call.read()
                if piece := call.answers[0].piece():
                    yield piece

    def embed(self, texts: Prompts, adapter: Adapters = None, pooling: Pooling = "last") -> list[list[float]]:
        """A vector of length one for each text: the last hidden state of its last token, or the mean of all tokens'."""
        return vectors(self._ended(self._read(texts, adapter, pooling)))

    async def aembed(self, texts: Prompts, adapter: Adapters = None, pooling: Pooling = "last") -> list[list[float]]:
        """As `embed`, for asyncio."""
        return vectors(await self._ended_async(await asyncio.to_thread(self._read, texts, adapter, pooling)))

    def score(self, text_1: Texts, text_2: Texts, adapter: str | None = None, pooling: Pooling = "last") -> list[float]:
        """How near texts are, the cosine of their vectors: one text with each of a list, or two lists in pairs."""
        texts, pairs = paired(text_1, text_2)
        return scores(self.embed(texts, adapter, pooling), pairs)

    async def ascore(
        self, text_1: Texts, text_2: Texts, adapter: str | None = None, pooling: Pooling = "last"
    ) -> list[float]:
        """As `score`, for asyncio."""
        texts, pairs = paired(text_1, text_2)
        return scores(await self.aembed(texts, adapter, pooling), pairs)

    def _pieces(self, asked: Asked) -> Iterator[Piece]:
        with self._opened(asked, bell := ThreadBell(), is_streamed=True) as call:
            while call.is_open:
                bell.wait_for_ring()
                call.read()
                if piece := call.answers[0].piece():
                    yield piece

    def _ended(self, asked: Asked) -> list[PartialCompletion]:
        with (
            self._opened(asked, bell := ThreadBell()) as call,
            Progress("Answering", len(call.answers), "prompts", self._quiet) as progress,
        ):
            while call.is_open:
                bell.wait_for_ring()
                progress.update(call.read())
        return call.answers

    async def _ended_async(self, asked: Asked) -> list[PartialCompletion]:
        with self._opened(asked, bell := LoopBell()) as call:
            while call.is_open:
                await bell.wait_for_ring()
                call.read()
        return call.answers

    # ── what is asked ────────────────────────────────────────────────────────────────────────────────────────────

    def _prompted(self, prompts: Prompts, params: Params, adapter: Adapters, n: int) -> Asked:
        tokens = [self._tokens_of(prompt) for prompt in listed_prompts(prompts)]
        return self._asked(tokens, params, adapter, n)

    def _conversed(self, messages: Messages, params: Params, adapter: Adapters, n: int) -> Asked:
        tokens = [self._tokenizer.apply_chat_template(one) for one in listed_conversations(messages)]
        return replace(self._asked(tokens, params, adapter, n), is_continuation=False)

    def _read(self, texts: Prompts, adapter: Adapters, pooling: Pooling) -> Asked:
        """No token is drawn, and sampling must have a value."""
        return replace(self._prompted(texts, ONE_TOKEN, adapter, 1), pooling=pooling)

    def _one(self, prompt: Any, params: SamplingParams | None, adapter: str | None) -> Asked:
        is_conversation = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
        asked = (self._conversed if is_conversation else self._prompted)(prompt, params, adapter, 1)
        if len(asked.prompts) != 1:
            raise RequestError.bad_field(
                "prompt", f"A stream is the answer to one prompt, not to {len(asked.prompts)}; open one for each."
            )
        return asked

    def _tokens_of(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        return checked_tokens(prompt, self._tokenizer.vocab_size)

    def _asked(self, prompts: list[tuple[int, ...]], params: Params, adapter: Adapters, n: int) -> Asked:
        if not isinstance(n, int) or n < 1:
            raise RequestError.bad_field("n", f"n must be a whole number of at least 1, not {n!r}.")
        samplings = [
            replace(one, stop_token_ids=one.stop_token_ids | self._tokenizer.eos_ids)
            if one.grammar or not one.ignore_eos
            else one
            for one in each_params(params, len(prompts))
        ]
        names = each_adapter(adapter, len(prompts))
        for name in dict.fromkeys(names):
            self._resolve(name)
        return Asked(prompts, samplings, names, n=n)

    def _resolve(self, name: str | None) -> None:
        """Load what lies below lora_resolver under a name that is not known."""
        if self._prefix is None or name is None or self._registry.get(name) is not None:
            return
        entry = self._prefix.entry(name)
        if entry is not None and not self._prefix.is_missing(entry):
            with suppress(NothingError), self._loading:
                if self._registry.get(name) is None:  # else another call has loaded it meanwhile
                    self._load(entry)

    # ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _opened(self, asked: Asked, bell: Bell, is_streamed: bool = False) -> Iterator[OpenCall]:
        """The requests of a call are open within the block; those that have not ended behind it are aborted."""
        with ExitStack() as ends:
            with self._sending:
                call = OpenCall(self._partial(asked), asked.n, bell, self._send, is_streamed)
                ends.callback(self._desk.remove, call)
                ends.callback(call.close)
                self._desk.add(call)
                for answer in call.answers:
                    self._send(answer.request)
            yield call

    def _partial(self, asked: Asked) -> list[PartialCompletion]:
        now, answers = time.monotonic(), []
        for prompt, sampling, name in zip(asked.prompts, asked.samplings, asked.adapters, strict=True):
            adapter = self._registry.find(name)
            for choice in range(asked.n):
                request = Request(
                    request_id=RequestId(f"prompt {next(self._ids)}"),
                    prompt=prompt,
                    sampling=seeded(sampling, choice),
                    arrived_at=now,
                    adapter_id=adapter.adapter_id,
                    pooling=asked.pooling,
                )
                text = TextStream(self._tokenizer, request.sampling, asked.is_continuation)
                answers.append(PartialCompletion(request, text))
        return answers

    def _send(self, message: Message) -> None:
        try:
            self._service.send(message)
        except RequestError as error:
            raise dead(str(error)) from None

    def _wait_until_ready(self) -> None:
        try:
            self._service.wait_until_ready()
        except EngineDiedError as died:
            raise self._service.error or died from None


def completions(answers: Sequence[PartialCompletion]) -> list[Completion]:
    return [answer.completion() for answer in answers]


def vectors(answers: Sequence[PartialCompletion]) -> list[list[float]]:
    return [answer.vector() for answer in answers]


def _end(service: InProcessService) -> None:
    """The end of the program waits for the engine's thread; the garbage collector, in whatever thread, must not."""
    if threading.main_thread().is_alive():
        service.close()
    else:
        service.stop()
