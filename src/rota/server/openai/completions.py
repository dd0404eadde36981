"""POST /v1/completions continues prompts, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.server.answer import ParsedCall, SentAs, requests_for
from rota.server.choices import Choice, Chunk
from rota.server.front import Front
from rota.server.openai.bodies import CompletionBody
from rota.server.openai.completion_fields import CompletionCall, CompletionFields, read_completion
from rota.server.openai.logprobs import CompletionLogprobs, TokenNamer, prompt_logprobs
from rota.server.openai.model_names import model_for
from rota.server.openai.shape import OpenAiShape
from rota.server.openapi import gives, takes
from rota.server.prompts import Tokens
from rota.server.respond import respond
from rota.text.tokenizer import Tokenizer


def install_completions_route(app: FastAPI, front: Front) -> None:
    @app.post("/v1/completions", openapi_extra=takes(CompletionFields), responses=gives(CompletionBody, CompletionBody))
    async def completions(http: HttpRequest) -> Response:
        """Continue prompts."""
        call = front.identify(http)
        read = await front.read(call.key, http, read_completion)
        call = front.named(http, call, read.asks)
        model = model_for(front, call, read.names, read.asks)
        answer_id = f"cmpl-{call.name}"
        parsed = ParsedCall(
            call,
            answer_id,
            requests_for(call, answer_id, model, read.prompts.tokens, read.sampling, read.choices, read.asks),
            read.choices,
            openings=tuple(Chunk(text) for text in read.prompts.texts for _ in range(read.choices)),
            has_output=read.has_output,
            sent_as=tuple(SentAs(param, read.names.param) for param in read.prompts.params),
            limit_param=read.limit_param,
            text=read.asks.text,
            chosen=(model,) * len(read.prompts.tokens),
        )
        prompts = [request.prompt for request in parsed.requests]
        shape = CompletionShape(answer_id, model.adapter.name, read, prompts, front.tokenizer)
        return await respond(front, http, parsed, shape, read.is_streamed)


class CompletionShape(OpenAiShape):
    """A completion: text, and log-probabilities as four parallel lists."""

    event_kind = whole_kind = "text_completion"

    def __init__(
        self, answer_id: str, model: str, read: CompletionCall, prompts: list[Tokens], tokenizer: Tokenizer
    ) -> None:
        """`prompts`: one per choice, by position."""
        super().__init__(answer_id, model, read.options)
        self._read = read
        self._prompts = prompts
        self._pieces = tokenizer.pieces
        namer = TokenNamer(tokenizer.pieces, read.asks.names_by_id)
        shown = read.asks.text.shown_of(tokenizer.pieces)
        self._logprobs = [
            CompletionLogprobs(namer, prompt if read.is_echoed else (), shown)
            for prompt in prompts
            if read.has_logprobs
        ]
        self._told: set[int] = set()

    def piece(self, choice: Choice, chunk: Chunk) -> dict[str, Any] | None:
        has_tokens = self._read.asks.tells_tokens and chunk.tokens
        return self.complete(choice, chunk) if chunk.has_news or has_tokens else None

    def complete(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        return {
            "index": choice.position,
            "text": chunk.text,
            "logprobs": self._logprobs[choice.position].shape(chunk) if self._logprobs else None,
            "finish_reason": chunk.finish_reason,
            **(self._tokens(choice, chunk) if self._read.asks.tells_tokens else {}),
            **(self._scores(choice, chunk) if self._read.tells_prompt_logprobs else {}),
        }

    def _tokens(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        """vLLM's fields. The prompt's tokens come once."""
        told = {"token_ids": chunk.tokens}
        if choice.position not in self._told:
            self._told.add(choice.position)
            told["prompt_token_ids"] = list(self._prompts[choice.position])
        return told

    def _scores(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        return {"prompt_logprobs": prompt_logprobs(self._pieces, self._prompts[choice.position], chunk.scores)}
