"""An answer is all that one call gets: a choice for every prompt and each of its `n`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from rota.core.adapter import Adapter
from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.request import Request, SamplingParams
from rota.runtime.seeds import seeded
from rota.server.choices import Choice, Chunk
from rota.server.front import Front
from rota.server.open_answers import Call, OpenAnswer, name_of, request_id_for
from rota.server.streams import Reply
from rota.text.stream import TextStream

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SentAs:
    """The fields by which a client sent what the engine knows as a request's prompt and model."""

    prompt: str = "prompt"
    model: str = "model"


@dataclass(frozen=True, slots=True)
class Ask:
    """One call, checked and tokenized: the requests that it makes, one for each choice, by position."""

    call: Call
    answer_id: str
    requests: tuple[Request, ...]
    # Choices of one prompt stand side by side, and it is counted once.
    choices_per_prompt: int = 1
    # Whether the text goes on where its prompt ends; false for an answer in a chat.
    is_continuation: bool = True
    # What each choice says before any token: the prompt, where it is echoed.
    openings: tuple[Chunk, ...] = ()
    # Whether the tokens that its requests make are wanted; false where only prompts are scored.
    has_output: bool = True
    # For each prompt.
    sent_as: tuple[SentAs, ...] = (SentAs(),)

    def in_client_words(self, fault: Fault, position: int) -> Fault:
        """What the engine says of one request, with the field that the client knows."""
        sent = self.sent_as[position // self.choices_per_prompt]
        words = {"prompt": sent.prompt, "model": sent.model}
        return replace(fault, param=words.get(fault.param or "", fault.param))


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens an answer has taken."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk, and the choice it belongs to."""

    choice: Choice
    chunk: Chunk


class Answer:
    """Opens a call's requests and makes chunks of what comes; whoever opens it closes it."""

    def __init__(self, front: Front, ask: Ask, lull_s: float | None = None) -> None:
        """Raises RequestError if a name is taken or the service is down. `lull_s`: see `next`."""
        self._front = front
        self._ask = ask
        self.choices = [
            Choice(
                position,
                len(request.prompt),
                TextStream(front.tokenizer, request.sampling.stop, ask.is_continuation),
                ask.has_output,
            )
            for position, request in enumerate(ask.requests)
        ]
        self._opening = [Part(*opened) for opened in zip(self.choices, ask.openings, strict=False)]
        self._is_refused = False
        self._usage: Usage | None = None
        front.answers.check_free(ask.call.key, {ask.call.name, ask.answer_id, *map(name_of, ask.requests)})
        self.reply = front.streams.open(ask.requests, lull_s)
        self._entry = OpenAnswer(ask.call, ask.answer_id, ask.requests, self.reply)
        front.answers.add(self._entry)
        self._time_out = _fail_later(self.reply, front.request_timeout_s)

    @property
    def is_finished(self) -> bool:
        return all(choice.is_finished for choice in self.choices)

    @property
    def usage(self) -> Usage:
        """Counted once a step: every event of a stream may tell it, and there are as many as choices."""
        if self._usage is None:
            self._usage = self._count()
        return self._usage

    def _count(self) -> Usage:
        first_choices = self.choices[:: self._ask.choices_per_prompt]
        return Usage(
            sum(choice.prompt_tokens for choice in first_choices),
            sum(choice.output_tokens for choice in self.choices),
            sum(choice.cached_tokens for choice in first_choices),
        )

    async def next(self) -> list[Part]:
        """What comes next; nothing after a lull of `lull_s`. Raises RequestError, or ClientGone."""
        parts, self._opening = self._opening, []
        deltas = await self.reply.next()
        self._usage = None
        for position, delta in deltas.items():
            choice = self.choices[position]
            try:
                chunk = choice.push(delta)
            except RequestError as error:
                self._is_refused = not self.usage.output_tokens
                raise RequestError(self._ask.in_client_words(error.fault, position)) from None
            if chunk.finish_reason:
                self.reply.end(position)
            parts.append(Part(choice, chunk))
        return parts

    def close(self) -> None:
        """Want no more of it, charge what it took, and give its names free."""
        if self._time_out:
            self._time_out.cancel()
        self.reply.close()
        self._front.answers.remove(self._entry)
        if not self._is_refused:
            self._front.access.charge_tokens(self._ask.call.key, self.usage.prompt_tokens + self.usage.output_tokens)


def _fail_later(reply: Reply, timeout_s: float | None) -> asyncio.TimerHandle | None:
    if timeout_s is None:
        return None
    fault = Fault(
        FaultCode.TIMED_OUT, f"The request did not end within {timeout_s:g} seconds, the limit of this server."
    )
    return asyncio.get_running_loop().call_later(timeout_s, reply.fail, fault)


def requests_for(
    call: Call, answer_id: str, model: Adapter, prompts: list[Tokens], sampling: SamplingParams, choices: int
) -> tuple[Request, ...]:
    """A request for each choice of each prompt. A single one is named like the answer."""
    now = time.monotonic()
    is_single = len(prompts) * choices == 1
    return tuple(
        Request(
            request_id=request_id_for(answer_id if is_single else f"{answer_id}-{prompt}-{choice}"),
            prompt=tokens,
            sampling=seeded(sampling, choice),
            arrived_at=now,
            adapter_id=model.adapter_id,
            priority=call.key.priority,
        )
        for prompt, tokens in enumerate(prompts)
        for choice in range(choices)
    )
