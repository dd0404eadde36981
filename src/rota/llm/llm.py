"""A model as an object: prompts in, completions out, in the calling thread."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rota.core.errors import AdapterError, ConfigError, RequestError
from rota.core.events import AdapterAdded, AdapterRefused, Event, Finished, FinishReason, Produced, PromptsScored
from rota.core.ids import AdapterId, RequestId
from rota.core.lora_paths import LoraPath
from rota.core.options import refuse_unknown
from rota.core.plan import TokenLogprobs
from rota.core.request import Request, SamplingParams
from rota.engine.progress import Progress
from rota.llm.config import (
    ENGINE_CONFIGS,
    build_device,
    engine_config,
    first_adapters,
    locate_model,
    locator_for,
    prefix_for,
    with_first,
)
from rota.observe.request_log import log_engines
from rota.runtime.doorbell import Doorbell
from rota.runtime.live import LiveWorld
from rota.runtime.loop import Emit, run
from rota.runtime.offline import OfflineInbox
from rota.runtime.registry import Registry
from rota.runtime.seeds import seeded
from rota.scheduler import Scheduler
from rota.sources.source import NothingError
from rota.text.chat import ChatMessage
from rota.text.stream import TextStream
from rota.text.tokenizer import Tokenizer

# ── completion ──────────────────────────────────────────────────────────────────────────────────────────────────────
# A completion grows token by token until its request ends.


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    # One per token, if the parameters asked for them.
    logprobs: tuple[TokenLogprobs, ...] = ()
    # One per token of the prompt, from its second token on, if the parameters asked for them.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(slots=True)
class PartialCompletion:
    """A completion whose request is still open."""

    stream: TextStream
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)
    ending: Finished | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended it."""
        return self.stream.matched_stop is not None

    def push(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Whether this token has stopped it."""
        self.text += self.stream.push((token,))
        self.tokens.append(token)
        if logprobs:
            self.logprobs.append(logprobs)
        return self.is_stopped

    def completion(self) -> Completion:
        assert self.ending is not None, "the loop ends when every request has ended"
        text = self.text + self.stream.finish()
        return Completion(
            text,
            tuple(self.tokens),
            FinishReason.STOP.value if self.is_stopped else self.ending.reason.value,
            self.ending.prompt_tokens,
            self.ending.cached_tokens,
            tuple(self.logprobs),
            tuple(self.scores),
        )


Prompt = str | Sequence[int]
# No stream stands still for a step: it may be as large as chunked_prefill_size says, and a minute is long enough.
STEP_MS = 60_000.0


class LLM:
    """A model that is loaded once and asked often. Prompts with the same beginning share KV, also across calls."""

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
        if model is not None:
            options["model_path"] = str(model)
        config = engine_config({"max_step_ms": STEP_MS, **options}, quiet)
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
        self._device = build_device(config)
        self._scheduler = Scheduler.from_config(config, self._device.capacity)
        self._registry = Registry(Path(config.model.model_path).resolve().name, config.model.model_path)
        self._doorbell = Doorbell()
        for entry in wanted.values():
            self._load(entry)

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Read an adapter; prompts can then ask for it by name. Raises AdapterError if it cannot be served."""
        self._load(LoraPath(name=name, path=str(path)))

    def _load(self, entry: LoraPath) -> None:
        adapter = self._registry.add(locator_for(self._config.lora).locate(entry))
        inbox = OfflineInbox(adapters=[adapter], doorbell=self._doorbell)
        refusals: list[str] = []

        def emit(events: list[Event]) -> None:
            for event in events:
                if isinstance(event, AdapterAdded | AdapterRefused):
                    inbox.note_ended(event.adapter_id)
                if isinstance(event, AdapterRefused):
                    refusals.append(event.reason)

        self._run_loop(inbox, emit)
        if refusals:
            self._registry.forget(entry.name)
            raise AdapterError(refusals[0])

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Continue every prompt, each a text or tokens. Raises RequestError if one cannot be served.

        `adapter` names one adapter for all prompts, or a list with one per prompt. None is the base model.
        """
        listed = [prompts] if isinstance(prompts, str) else prompts
        return self._complete([self._tokens_of(prompt) for prompt in listed], params, adapter, is_continuation=True)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Answer one conversation, or several, through the model's chat template."""
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self._tokenizer.apply_chat_template(conversation) for conversation in conversations]
        return self._complete(prompts, params, adapter, is_continuation=False)

    def _tokens_of(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        for token in prompt:
            if not isinstance(token, int) or not 0 <= token < self._tokenizer.vocab_size:
                raise RequestError.bad_field(
                    "prompt", f"A prompt holds {token!r}; token ids lie between 0 and {self._tokenizer.vocab_size - 1}."
                )
        return tuple(prompt)

    def _complete(
        self,
        prompts: list[tuple[int, ...]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None,
        is_continuation: bool,
    ) -> list[Completion]:
        answers: dict[RequestId, PartialCompletion] = {}
        requests: list[Request] = []
        now = time.monotonic()
        wanted = zip(prompts, _one_each(params, len(prompts)), self._adapter_ids(adapter, len(prompts)), strict=True)
        for index, (prompt, sampling, adapter_id) in enumerate(wanted):
            if sampling.grammar or not sampling.ignore_eos:
                sampling = replace(sampling, stop_token_ids=sampling.stop_token_ids | self._tokenizer.eos_ids)
            request = Request(
                request_id=RequestId(f"prompt {index}"),
                prompt=prompt,
                sampling=seeded(sampling),
                arrived_at=now,
                adapter_id=adapter_id,
            )
            requests.append(request)
            answers[request.request_id] = PartialCompletion(TextStream(self._tokenizer, sampling, is_continuation))
        self._answer(requests, answers)
        return [answer.completion() for answer in answers.values()]

    def _adapter_ids(self, adapter: str | Sequence[str | None] | None, count: int) -> list[AdapterId]:
        names = [adapter] * count if adapter is None or isinstance(adapter, str) else list(adapter)
        if len(names) != count:
            raise RequestError.bad_field(
                "adapter", f"There are {count} prompts but {len(names)} adapters; give one per prompt."
            )
        for name in dict.fromkeys(names):
            self._resolve(name)
        return [self._registry.find(name).adapter_id for name in names]

    def _resolve(self, name: str | None) -> None:
        """Load what lies below lora_resolver under a name that is not known."""
        if self._prefix is None or name is None or self._registry.get(name) is not None:
            return
        entry = self._prefix.entry(name)
        if entry is not None and not self._prefix.is_missing(entry):
            with suppress(NothingError):
                self._load(entry)

    def _answer(self, requests: list[Request], answers: dict[RequestId, PartialCompletion]) -> None:
        inbox = OfflineInbox(requests, self._config.scheduler.max_queued_requests, doorbell=self._doorbell)
        failed: list[Finished] = []
        with Progress("Answering", len(requests), "prompts", self._quiet) as progress:

            def emit(events: list[Event]) -> None:
                for event in events:
                    match event:
                        case Produced():
                            _push_tokens(event, answers, inbox)
                        case PromptsScored(_, request_ids, scores):
                            for request_id, new_scores in zip(request_ids, scores, strict=True):
                                answers[request_id].scores.extend(new_scores)
                        case Finished(request_id=request_id) if not failed:
                            inbox.note_ended(request_id)
                            answers[request_id].ending = event
                            progress.update()
                            if event.fault:
                                failed.append(event)
                                inbox.close()

            self._run_loop(inbox, emit)
        for event in failed:
            assert event.fault is not None
            message = f"{event.request_id.capitalize()}: {event.fault.message}"
            raise RequestError(replace(event.fault, message=message))

    def _run_loop(self, inbox: OfflineInbox, emit: Emit) -> None:
        def heard(events: list[Event]) -> None:
            log_engines(events)
            emit(events)

        try:
            run(self._scheduler, LiveWorld(self._device, inbox), heard, self._config.scheduler.overlap_depth)
        # Also KeyboardInterrupt: an interrupted run leaves its requests in the scheduler. The next needs an empty one.
        except BaseException:
            self._scheduler.abandon(time.monotonic())
            raise


def _push_tokens(event: Produced, answers: dict[RequestId, PartialCompletion], inbox: OfflineInbox) -> None:
    logprobs = dict(event.logprobs)
    for index, (request_id, token) in enumerate(zip(event.request_ids, event.tokens, strict=True)):
        answer = answers[request_id]
        if answer.is_stopped:
            continue  # the token was made before the abort arrived
        if answer.push(token, logprobs.get(index)):
            inbox.abort(request_id)


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError.bad_field(
            "params", f"There are {count} prompts but {len(params)} parameters; give one per prompt."
        )
    return params
