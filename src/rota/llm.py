"""The model as an object: prompts in, completions out, in the calling thread."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from rota.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from rota.core.errors import RequestError
from rota.core.events import Event, Finished, FinishReason, Produced
from rota.core.ids import RequestId
from rota.core.options import build, refuse_unknown
from rota.core.plan import TokenLogprobs
from rota.core.request import Request, SamplingParams
from rota.engine.builtin import builtin_model_folder
from rota.runtime.live import LiveWorld
from rota.runtime.loop import run
from rota.runtime.offline import OfflineInbox
from rota.runtime.world import Device
from rota.scheduler import Scheduler
from rota.text.chat import ChatMessage
from rota.text.stream import Piece, TextStream
from rota.text.tokenizer import Tokenizer

ENGINE_CONFIGS = (ModelConfig, CacheConfig, SchedulerConfig)

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of one prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    # One per token, if the parameters asked for them.
    logprobs: tuple[TokenLogprobs, ...] = ()


class LLM:
    """A model that is loaded once and asked often; prompts that begin alike share their KV, also across calls."""

    def __init__(self, model: str | Path | None = None, *, quiet: bool = False, **options: Any) -> None:
        """Without a model, the built-in one. Options are the flags of `rota serve`, with underscores."""
        refuse_unknown(options, *ENGINE_CONFIGS)
        if model is not None:
            options["model_path"] = str(model)
        config = locate_model(engine_config(options, quiet))
        assert config.model.model_path is not None
        self._quiet = quiet
        self._config = config.scheduler
        self._tokenizer = Tokenizer(config.model.model_path)
        self._device = build_device(config)
        self._scheduler = Scheduler(self._config, self._device.capacity)

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Continue every prompt, a text or its tokens; raises RequestError if one cannot be served."""
        listed = [prompts] if isinstance(prompts, str) else prompts
        return self._complete([self._tokens_of(prompt) for prompt in listed], params, is_continuation=True)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer one conversation, or each of several, through the model's chat template."""
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self._tokenizer.apply_chat_template(conversation) for conversation in conversations]
        return self._complete(prompts, params, is_continuation=False)

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
        is_continuation: bool,
    ) -> list[Completion]:
        answers: dict[RequestId, Answer] = {}
        requests: list[Request] = []
        now = time.monotonic()
        for index, (prompt, sampling) in enumerate(zip(prompts, _one_each(params, len(prompts)), strict=True)):
            if not sampling.ignore_eos:
                sampling = replace(sampling, stop_token_ids=sampling.stop_token_ids | self._tokenizer.eos_ids)
            request = Request(RequestId(f"prompt {index}"), prompt, sampling, now)
            requests.append(request)
            answers[request.request_id] = Answer(TextStream(self._tokenizer, sampling.stop, is_continuation))
        self._run(requests, answers)
        return [answer.completion() for answer in answers.values()]

    def _run(self, requests: list[Request], answers: dict[RequestId, Answer]) -> None:
        inbox = OfflineInbox(requests, max_open=self._config.max_queued_requests)
        failed: list[Finished] = []
        with tqdm(total=len(requests), unit="prompt", disable=self._quiet) as bar:

            def emit(events: list[Event]) -> None:
                for event in events:
                    match event:
                        case Produced():
                            _hand_out(event, answers, inbox)
                        case Finished(request_id) if not failed:
                            inbox.note_ended(request_id)
                            answers[request_id].ending = event
                            bar.update()
                            if event.fault:
                                failed.append(event)
                                inbox.close()

            try:
                run(self._scheduler, LiveWorld(self._device, inbox), emit, self._config.overlap_depth)
            except BaseException:
                # An interrupted run leaves its requests in the books; the next one begins with clean ones.
                self._scheduler = Scheduler(self._config, self._device.capacity)
                raise
        for event in failed:
            assert event.fault is not None
            message = f"{event.request_id.capitalize()}: {event.fault.message}"
            raise RequestError(replace(event.fault, message=message))


@dataclass(slots=True)
class Answer:
    """A completion in the making."""

    stream: TextStream
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_stopped: bool = False
    ending: Finished | None = None

    def push(self, token: int, logprobs: TokenLogprobs | None) -> Piece:
        piece = self.stream.push((token,))
        self.text += piece.text
        self.is_stopped = piece.is_stopped
        self.tokens.append(token)
        if logprobs:
            self.logprobs.append(logprobs)
        return piece

    def completion(self) -> Completion:
        assert self.ending is not None, "the loop ends when every request has ended"
        last = self.stream.finish()
        is_stopped = self.is_stopped or last.is_stopped
        return Completion(
            self.text + last.text,
            tuple(self.tokens),
            FinishReason.STOP.value if is_stopped else self.ending.reason.value,
            self.ending.prompt_tokens,
            self.ending.cached_tokens,
            tuple(self.logprobs),
        )


def _hand_out(event: Produced, answers: dict[RequestId, Answer], inbox: OfflineInbox) -> None:
    logprobs = dict(event.logprobs)
    for index, (request_id, token) in enumerate(zip(event.request_ids, event.tokens, strict=True)):
        answer = answers[request_id]
        if answer.is_stopped:
            continue  # made before the abort arrived
        if answer.push(token, logprobs.get(index)).is_stopped:
            inbox.abort(request_id)


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError.bad_field(
            "params", f"There are {count} prompts but {len(params)} parameters; give one each."
        )
    return params


def engine_config(options: Mapping[str, Any], quiet: bool) -> EngineConfig:
    """The engine's config from options by name; those of others are left alone."""
    return EngineConfig(
        model=build(ModelConfig, options),
        cache=build(CacheConfig, options),
        scheduler=build(SchedulerConfig, options),
        quiet=quiet,
    )


def locate_model(config: EngineConfig) -> EngineConfig:
    """The same config with a model folder in it: the built-in model's, unpacked if need be, when none was named."""
    if config.model.model_path is not None:
        return config
    folder = builtin_model_folder(config.quiet)
    return replace(config, model=replace(config.model, model_path=str(folder)))


def build_device(config: EngineConfig) -> Device[Any]:
    """The engine. Loads torch, which a server's own process has no use for."""
    from rota.engine.engine import build_engine

    return build_engine(config)
