"""An answer holds all choices of one call: `n` for every prompt."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import FinishReason, Moved
from rota.core.plan import TokenLogprobs
from rota.core.request import Request, SamplingParams
from rota.runtime.seeds import seeded
from rota.server.access.disclosure import fault_for
from rota.server.access.limits import CallDemand, Hold
from rota.server.call import NO_OPTIONS, CallOptions
from rota.server.context import AppContext
from rota.server.open_answers import Call, OpenAnswer, name_of, request_id_for
from rota.server.streams import CallReply, Delta
from rota.server.traffic.route import Chosen
from rota.text.stream import PLAIN_TEXT, TextOptions, TextStream
from rota.text.tokenizer import Tokenizer

# ── choices ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# A choice turns one request's tokens into text until it ends.


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """What a delta adds to an answer. `finish_reason` is set in the last chunk."""

    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Log-probabilities of the prompt's tokens, from the second on: the first has none.
    scores: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    # Of a request with pooling, in its only chunk.
    embedding: tuple[float, ...] | None = None

    @property
    def has_news(self) -> bool:
        """False while text is held back, for example in the middle of a character."""
        return bool(self.text or self.logprobs or self.scores or self.finish_reason)


class Choice:
    """Counts and detokenizes the tokens of one answer, and notices its end."""

    def __init__(self, position: int, prompt_tokens: int, text: TextStream, has_output: bool = True) -> None:
        """Without output, its tokens are dropped: the client wants the prompt's scores alone."""
        self.position = position
        self.prompt_tokens = prompt_tokens
        self.output_tokens = 0
        self.cached_tokens = 0
        self.is_finished = False
        self.moves: list[Moved] = []  # from one version of its adapter to another
        self._text = text
        self._has_output = has_output

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._text.matched_stop

    def push(self, delta: Delta) -> AnswerChunk:
        """Take a delta. Raises RequestError if the request failed. A stop string ends the choice early."""
        if not self.output_tokens:
            self.cached_tokens = delta.cached_tokens
        self.moves += delta.moves
        text = ""
        taken = 0
        is_stopped = False
        for token in delta.tokens if self._has_output else ():
            piece = self._text.push((token,))
            text += piece.text
            taken += 1
            if is_stopped := piece.is_stopped:
                break
        self.output_tokens += taken
        ending = delta.ending
        if ending and not is_stopped:
            if ending.fault:
                raise RequestError(ending.fault)
            piece = self._text.finish()
            text += piece.text
            is_stopped = piece.is_stopped
        self.is_finished = is_stopped or ending is not None
        reason = FinishReason.STOP.value if is_stopped else ending.reason.value if ending else None
        embedding = ending.embedding if ending else None
        return AnswerChunk(text, delta.tokens[:taken], delta.logprobs[:taken], delta.scores, reason, embedding)


class Gathered:
    """The chunks of one choice, which become one chunk as they come.

    Kept apart they would be four objects a token for the garbage collector to visit. Beside long answers that are not
    streamed that is hundreds of thousands, and a collection would hold up the tokens of all clients.
    """

    __slots__ = ("_last", "_logprobs", "_scores", "_texts", "_tokens")

    def __init__(self, first: AnswerChunk) -> None:
        self._texts = [first.text]
        self._tokens, self._logprobs, self._scores = [*first.tokens], [*first.logprobs], [*first.scores]
        self._last = first

    def add(self, chunk: AnswerChunk) -> None:
        self._texts.append(chunk.text)
        self._tokens += chunk.tokens
        self._logprobs += chunk.logprobs
        self._scores += chunk.scores
        self._last = chunk

    @property
    def chunk(self) -> AnswerChunk:
        reason, embedding = self._last.finish_reason, self._last.embedding
        return AnswerChunk("".join(self._texts), self._tokens, self._logprobs, self._scores, reason, embedding)


def joined(chunks: Sequence[AnswerChunk]) -> AnswerChunk:
    """All chunks of one choice as one chunk."""
    gathered = Gathered(chunks[0])
    for chunk in chunks[1:]:
        gathered.add(chunk)
    return gathered.chunk


# ── answer ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# An answer holds all choices of one call: `n` for every prompt.

Tokens = tuple[int, ...]

# Of an answer that is sent at its end. Stop strings are looked for in every token: they end the request.
TOKENS_AT_A_TIME = 16
# Before it is read for the first time: answers that began together are not all read in the same step.
_FIRST_TOKENS = itertools.cycle(range(1, TOKENS_AT_A_TIME + 1))


@dataclass(frozen=True, slots=True)
class SentAs:
    """The names of the fields in which the client sent the prompt and the model."""

    prompt: str = "prompt"
    model: str = "model"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call after its checks: one tokenized request per choice, by position."""

    call: Call
    answer_id: str
    requests: tuple[Request, ...]
    # Choices of one prompt stand side by side, and the prompt's tokens are counted once.
    choices_per_prompt: int = 1
    # Whether the text continues its prompt. False for an answer in a chat.
    is_continuation: bool = True
    # The text of each choice before its first token: the prompt, if it is echoed.
    openings: tuple[AnswerChunk, ...] = ()
    # Whether the client wants output tokens. False if only prompts are scored.
    has_output: bool = True
    # One per prompt.
    sent_as: tuple[SentAs, ...] = (SentAs(),)
    # The client's field that limits the output. None: the client set no limit.
    limit_param: str | None = "max_tokens"
    text: TextOptions = PLAIN_TEXT
    # The adapter of each prompt, and why it is this one.
    chosen: tuple[Chosen, ...] = ()

    def text_of(self, request: Request, tokenizer: Tokenizer) -> TextStream:
        """The text of one of its requests."""
        options = self.text.with_ends_of(request.sampling)
        return TextStream(tokenizer, request.sampling.stop, self.is_continuation, options)

    def ask(self, context: int | None) -> CallDemand:
        """The most tokens that the call may take. Without an engine the length of the context is not known."""
        prompts = self.requests[:: self.choices_per_prompt]
        return CallDemand(
            answers=len(self.requests),
            prompt_tokens=sum(len(request.prompt) for request in prompts),
            output_tokens=sum(_most_output(one, context) for one in self.requests) if self.has_output else 0,
            is_open_ended=self.limit_param is None or context is None,
        )

    def with_client_field(self, fault: Fault, position: int) -> Fault:
        """The engine's fault for one request, with the name of the client's field."""
        sent = self.sent_as[position // self.choices_per_prompt]
        names = {"prompt": sent.prompt, "model": sent.model}
        return replace(fault, param=names.get(fault.param or "", fault.param))


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of an answer."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk and its choice."""

    choice: Choice
    chunk: AnswerChunk


class Answer:
    """Opens a call's requests and makes chunks of their tokens. The caller that opens it closes it."""

    def __init__(self, context: AppContext, parsed: ParsedCall, idle_s: float | None = None) -> None:
        """Raises RequestError if a name is taken, a limit is met or the service is down. `idle_s`: see `next`."""
        self._context = context
        self._parsed = parsed
        self.choices = [
            Choice(
                position,
                len(request.prompt),
                parsed.text_of(request, context.tokenizer),
                parsed.has_output,
            )
            for position, request in enumerate(parsed.requests)
        ]
        self._opening = [Part(*opened) for opened in zip(self.choices, parsed.openings, strict=False)]
        self._is_refused = False
        self._usage: Usage | None = None
        context.answers.check_free(
            parsed.call.key, {parsed.call.name, parsed.answer_id, *map(name_of, parsed.requests)}
        )
        self._hold = self._reserve()
        try:
            self.reply = context.streams.open(parsed.requests, idle_s)
        except BaseException:  # whatever it is, nothing has been used
            context.access.admission.settle(self._hold, 0)
            raise
        chosen = tuple([one for one in parsed.chosen for _ in range(parsed.choices_per_prompt)])
        self._entry = OpenAnswer(parsed.call, parsed.answer_id, parsed.requests, self.reply, chosen)
        context.answers.add(self._entry)
        self._time_out = _fail_later(self.reply, context.request_timeout_s)

    @property
    def is_finished(self) -> bool:
        return all(choice.is_finished for choice in self.choices)

    @property
    def moves(self) -> list[tuple[int, Moved]]:
        """From one version of an adapter to another, each with the position of its choice."""
        return [(choice.position, move) for choice in self.choices for move in choice.moves]

    @property
    def usage(self) -> Usage:
        """Counted once per step, because every event of a stream may carry it, and each choice has its event."""
        if self._usage is None:
            self._usage = self._count()
        return self._usage

    def _count(self) -> Usage:
        first_choices = self.choices[:: self._parsed.choices_per_prompt]
        return Usage(
            sum(choice.prompt_tokens for choice in first_choices),
            sum(choice.output_tokens for choice in self.choices),
            sum(choice.cached_tokens for choice in first_choices),
        )

    async def whole(self, hear: Callable[[Part], None] | None = None) -> list[Part]:
        """One part for each choice, once all have ended; none with `hear`, which gets parts as they come.

        Raises as `next`.
        """
        gathered: dict[Choice, Gathered] = {}
        has_time = hear is None and not any(request.sampling.stop for request in self._parsed.requests)
        while not self.is_finished:
            if has_time:
                self.reply.wakes_at = TOKENS_AT_A_TIME if gathered else next(_FIRST_TOKENS)
            for part in await self.next():
                if hear is not None:
                    hear(part)
                elif so_far := gathered.get(part.choice):
                    so_far.add(part.chunk)
                else:
                    gathered[part.choice] = Gathered(part.chunk)
        return [Part(choice, one.chunk) for choice, one in gathered.items()]

    async def next(self) -> list[Part]:
        """The next parts, or none after `idle_s` without tokens. Raises RequestError or ClientGone."""
        parts, self._opening = self._opening, []
        deltas = await self.reply.next()
        self._usage = None
        for position, delta in deltas.items():
            choice = self.choices[position]
            try:
                chunk = choice.push(delta)
            except RequestError as error:
                self._is_refused = not self.reply.produced
                fault = fault_for(self._parsed.call.key, error.fault)
                raise RequestError(self._parsed.with_client_field(fault, position)) from None
            if chunk.finish_reason:
                self.reply.end(position)
            parts.append(Part(choice, chunk))
        return parts

    def close(self) -> None:
        """End its requests, settle its tokens, and free its names."""
        if self._time_out:
            self._time_out.cancel()
        self.reply.close()
        self._context.answers.remove(self._entry)
        self._context.access.admission.settle(self._hold, 0 if self._is_refused else self._used())

    def _reserve(self) -> Hold:
        parsed, capacity = self._parsed, self._context.service.state.capacity
        ask = parsed.ask(capacity.max_sequence_tokens if capacity else None)
        return self._context.access.admission.admit(parsed.call.key, ask, parsed.limit_param, parsed.sent_as[0].prompt)

    def _used(self) -> int:
        """An answer that is cut short costs what the engine made, also if its client has not read it."""
        output_tokens = self.usage.output_tokens if self.is_finished else self.reply.produced
        return self.usage.prompt_tokens + output_tokens


def _most_output(request: Request, context: int | None) -> int:
    """The engine stops at the end of the context."""
    asked = request.sampling.max_new_tokens
    return asked if context is None else min(asked, max(0, context - len(request.prompt)))


def _fail_later(reply: CallReply, timeout_s: float | None) -> asyncio.TimerHandle | None:
    if timeout_s is None:
        return None
    fault = Fault(
        FaultCode.TIMED_OUT, f"The request did not end within {timeout_s:g} seconds, the limit of this server."
    )
    return asyncio.get_running_loop().call_later(timeout_s, reply.fail, fault)


def requests_for(
    call: Call,
    answer_id: str,
    model: Chosen,
    prompts: Sequence[Tokens],
    sampling: SamplingParams,
    choices: int,
    call_options: CallOptions = NO_OPTIONS,
) -> tuple[Request, ...]:
    """One request per choice of each prompt. A single request has the answer's name."""
    now, scope = time.monotonic(), call.key.scope_with(call_options.cache_salt)
    priority = call.key.priority_for(call_options.priority)
    is_single = len(prompts) * choices == 1
    return tuple(
        Request(
            request_id=request_id_for(answer_id if is_single else f"{answer_id}-{prompt}-{choice}"),
            prompt=tokens,
            sampling=seeded(sampling, choice),
            arrived_at=now,
            adapter_id=model.adapter_id,
            tenant=call.key.tenant,
            cache_scope=scope,
            priority=priority,
            first_token_s=call.first_token_s,
        )
        for prompt, tokens in enumerate(prompts)
        for choice in range(choices)
    )
