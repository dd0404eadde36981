"""An answer holds all choices of one call, `n` for every prompt, and says what their tokens mean."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import FinishReason, Moved
from rota.core.request import Request
from rota.runtime.seeds import seeded
from rota.server.access.disclosure import fault_for
from rota.server.access.limits import CallDemand, Hold
from rota.server.calls.call import Call
from rota.server.context import AppContext
from rota.server.open_answers import CallIdentity, OpenAnswer, request_id_for
from rota.server.streams import CallReply, Delta
from rota.server.traffic.route import Chosen
from rota.text.parsed_delta import CallPiece, ParsedDelta
from rota.text.speech import OutputParser
from rota.text.stream import TextStream

# ── choices ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# A choice turns one request's tokens into text until it ends, and sorts the text.


class Choice:
    """What one request has said so far, in numbers, and how its next tokens are read."""

    def __init__(
        self, position: int, prompt_tokens: int, text: TextStream, parser: OutputParser, has_output: bool = True
    ) -> None:
        """Without output, its tokens are dropped: the client wants the prompt's scores alone."""
        self.position = position
        self.prompt_tokens = prompt_tokens
        self.output_tokens = 0
        self.thought_tokens = 0
        self.cached_tokens = 0
        self.is_finished = False
        self.moves: list[Moved] = []  # from one version of its adapter to another
        self._text = text
        self._parser = parser
        self._has_output = has_output
        self._has_called = False

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._text.matched_stop

    def read(self, delta: Delta) -> None:
        """Write into a delta what its tokens say. Tokens behind a stop string, which ends the choice, are dropped.

        Raises RequestError if the request failed.
        """
        if not self.output_tokens:
            self.cached_tokens = delta.cached_tokens
        self.moves += delta.moves
        text = self._text_of(delta)
        self.is_finished = self.matched_stop is not None or delta.ending is not None
        delta.said = self._parser.push(text)
        if self.is_finished:
            delta.said += self._parser.finish()
            delta.finish_reason = self._finish_reason(delta)
        self._has_called = self._has_called or bool(delta.said.calls)
        if delta.said.reasoning and not delta.said.content:
            self.thought_tokens += len(delta.tokens)

    def _text_of(self, delta: Delta) -> str:
        text = ""
        taken = 0
        for token in delta.tokens if self._has_output else ():
            text += self._text.push((token,))
            taken += 1
            if self.matched_stop is not None:
                break
        del delta.tokens[taken:], delta.logprobs[taken:]
        self.output_tokens += taken
        if delta.ending and self.matched_stop is None:
            if delta.ending.fault:
                raise RequestError(delta.ending.fault)
            text += self._text.finish()
        return text

    def _finish_reason(self, delta: Delta) -> str:
        """In OpenAI's words: 'tool_calls' if it made calls and was not cut short."""
        if self.matched_stop is None and delta.ending and delta.ending.reason is not FinishReason.STOP:
            return delta.ending.reason.value
        return "tool_calls" if self._has_called or delta.said.calls else FinishReason.STOP.value


class Gathered:
    """The deltas of one choice, which become one delta as they come.

    Kept apart they would be four objects a token for the garbage collector to visit. Beside long answers that are not
    streamed that is hundreds of thousands, and a collection would hold up the tokens of all clients.
    """

    def __init__(self, position: int) -> None:
        self._whole = Delta(position)
        self._contents: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[CallPiece] = []

    def add(self, delta: Delta) -> None:
        whole = self._whole
        whole.tokens += delta.tokens
        whole.logprobs += delta.logprobs
        whole.scores += delta.scores
        whole.ending, whole.finish_reason = delta.ending, delta.finish_reason
        self._contents.append(delta.said.content)
        self._thoughts.append(delta.said.reasoning)
        self._calls += delta.said.calls

    @property
    def whole(self) -> Delta:
        said = ParsedDelta("".join(self._contents), "".join(self._thoughts), tuple(self._calls))
        return replace(self._whole, said=said)


# ── answer ──────────────────────────────────────────────────────────────────────────────────────────────────────────

# Of an answer that is sent at its end. Stop strings are looked for in every token: they end the request.
TOKENS_AT_A_TIME = 16
# Before it is read for the first time: answers that began together are not all read in the same step.
_FIRST_TOKENS = itertools.cycle(range(1, TOKENS_AT_A_TIME + 1))


class Usage:
    """The tokens of an answer. Choices of one prompt stand side by side, and the prompt's tokens are counted once."""

    def __init__(self, choices: Sequence[Choice], per_prompt: int) -> None:
        self.prompt_tokens = sum(choice.prompt_tokens for choice in choices[::per_prompt])
        self.cached_tokens = sum(choice.cached_tokens for choice in choices[::per_prompt])
        self.output_tokens = sum(choice.output_tokens for choice in choices)


class Answer(OpenAnswer):
    """Opens a call's requests and reads their tokens. The caller that opens it closes it."""

    def __init__(
        self,
        context: AppContext,
        caller: CallIdentity,
        call: Call,
        answer_id: str,
        chosen: Sequence[Chosen],
        idle_s: float | None = None,
    ) -> None:
        """`chosen`: who answers, one for all prompts or one for each. `idle_s`: see `next`.

        Raises RequestError if a name is taken, a limit is met or the service is down.
        """
        each = [chosen[prompt % len(chosen)] for prompt in range(len(call.prompts.tokens)) for _ in range(call.choices)]
        super().__init__(caller, answer_id, _requests(caller, call, answer_id, each), tuple(each))
        self.call = call
        self.tokenizer = context.tokenizer
        self._context = context
        self.choices = [
            Choice(
                position,
                len(request.prompt),
                TextStream(context.tokenizer, request.sampling, call.is_continuation, call.text),
                call.speech.parser(),
                call.has_output,
            )
            for position, request in enumerate(self.requests)
        ]
        # The text of each choice before its first token: the prompt, if it is echoed.
        opened = [text for text in call.prompts.texts for _ in range(call.choices)]
        self._opening = [Delta(position, said=ParsedDelta(text)) for position, text in enumerate(opened)]
        self._is_refused = False
        self._usage: Usage | None = None
        context.answers.check_free(self)
        self._hold = self._reserve()
        try:
            self.reply = context.streams.open(self.requests, idle_s)
        except BaseException:  # whatever it is, nothing has been used
            context.access.admission.settle(self._hold, 0)
            raise
        context.answers.add(self)
        self._time_out = _fail_later(self.reply, context.config.request_timeout)

    @property
    def model(self) -> str:
        """The name of who answers; of several, the first one's."""
        return self.chosen[0].adapter.name

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
            self._usage = Usage(self.choices, self.call.choices)
        return self._usage

    async def whole(self) -> list[Delta]:
        """One delta for each choice, once all have ended. Raises as `next`."""
        gathered = [Gathered(choice.position) for choice in self.choices]
        has_time = not self.call.counts_thoughts and not any(one.sampling.stop for one in self.requests)
        is_begun = False
        while not self.is_finished:
            if has_time:
                self.reply.wakes_at = TOKENS_AT_A_TIME if is_begun else next(_FIRST_TOKENS)
            for delta in await self.next():
                gathered[delta.position].add(delta)
                is_begun = True
        return [one.whole for one in gathered]

    async def next(self) -> list[Delta]:
        """The next deltas, or none after `idle_s` without tokens. Raises RequestError or ClientDisconnect."""
        opening, self._opening = self._opening, []
        deltas = await self.reply.next()
        self._usage = None
        for delta in deltas:
            try:
                self.choices[delta.position].read(delta)
            except RequestError as error:
                self._is_refused = not self.reply.produced
                fault = fault_for(self.caller.key, error.fault)
                raise RequestError(self._with_client_field(fault, delta.position)) from None
            if delta.finish_reason:
                self.reply.end(delta.position)
        return opening + deltas

    def close(self) -> None:
        """End its requests, settle its tokens, and free its names."""
        if self._time_out:
            self._time_out.cancel()
        self.reply.close()
        self._context.answers.remove(self)
        self._context.access.admission.settle(self._hold, 0 if self._is_refused else self._used())

    def _reserve(self) -> Hold:
        """The most tokens that the call may take. Without an engine the length of the context is not known."""
        call, capacity = self.call, self._context.service.state.capacity
        context = capacity.max_sequence_tokens if capacity else None
        ask = CallDemand(
            answers=len(self.requests),
            prompt_tokens=sum(map(len, call.prompts.tokens)),
            output_tokens=sum(_most_output(one, context) for one in self.requests) if call.has_output else 0,
            is_open_ended=call.limit_param is None or context is None,
        )
        return self._context.access.admission.admit(self.caller.key, ask, call.limit_param, call.prompts.params[0])

    def _with_client_field(self, fault: Fault, position: int) -> Fault:
        """The engine's fault for one request, with the name of the client's field."""
        prompt = position // self.call.choices
        names = {"prompt": self.call.prompts.params[prompt], "model": self.call.models_of(prompt).param}
        return replace(fault, param=names.get(fault.param or "", fault.param))

    def _used(self) -> int:
        """An answer that is cut short costs what the engine made, also if its client has not read it."""
        output_tokens = self.usage.output_tokens if self.is_finished else self.reply.produced
        return self.usage.prompt_tokens + output_tokens


def _requests(caller: CallIdentity, call: Call, answer_id: str, chosen: Sequence[Chosen]) -> tuple[Request, ...]:
    """One request per choice of each prompt."""
    now, scope = time.monotonic(), caller.key.scope_with(call.cache_salt)
    priority = caller.key.priority_for(call.priority)
    return tuple(
        Request(
            request_id=request_id_for(call.request_name(answer_id, prompt, choice)),
            prompt=tokens,
            sampling=seeded(call.sampling_of(prompt), choice),
            arrived_at=now,
            adapter_id=chosen[prompt * call.choices].adapter.adapter_id,
            tenant=caller.key.tenant,
            cache_scope=scope,
            priority=priority,
            first_token_s=caller.first_token_s,
            pooling=call.pooling,
        )
        for prompt, tokens in enumerate(call.prompts.tokens)
        for choice in range(call.choices)
    )


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
