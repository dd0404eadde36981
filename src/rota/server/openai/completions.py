"""POST /v1/completions continues prompts, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.server.answer import ParsedCall, SentAs, requests_for
from rota.server.choices import Choice, Chunk
from rota.server.front import Front
from rota.server.openai.bodies import CompletionBody
from rota.server.openai.completion_fields import CompletionFields, read_completion
from rota.server.openai.logprobs import CompletionLogprobs
from rota.server.openai.model_names import model_for
from rota.server.openai.sampling_fields import StreamOptions
from rota.server.openai.shape import OpenAiShape
from rota.server.openapi import gives, takes
from rota.server.respond import respond


def install_completions_route(app: FastAPI, front: Front) -> None:
    @app.post("/v1/completions", openapi_extra=takes(CompletionFields), responses=gives(CompletionBody, CompletionBody))
    async def completions(http: HttpRequest) -> Response:
        """Continue prompts."""
        call = front.identify(http)
        read = await front.read(call.key, http, read_completion)
        model = model_for(front, call, read.names)
        answer_id = f"cmpl-{call.name}"
        parsed = ParsedCall(
            call,
            answer_id,
            requests_for(call, answer_id, model, read.prompts.tokens, read.sampling, read.choices, read.cache_salt),
            read.choices,
            openings=tuple(Chunk(text) for text in read.prompts.texts for _ in range(read.choices)),
            has_output=read.has_output,
            sent_as=tuple(SentAs(param, read.names.param) for param in read.prompts.params),
            limit_param=read.limit_param,
        )
        logprobs = None
        if read.has_logprobs:
            logprobs = [
                CompletionLogprobs(front.tokenizer.pieces, request.prompt if read.is_echoed else ())
                for request in parsed.requests
            ]
        shape = CompletionShape(answer_id, model.name, read.options, logprobs)
        return await respond(front, http, parsed, shape, read.is_streamed)


class CompletionShape(OpenAiShape):
    """A completion: text, and log-probabilities as four parallel lists."""

    event_kind = whole_kind = "text_completion"

    def __init__(
        self, answer_id: str, model: str, options: StreamOptions, logprobs: list[CompletionLogprobs] | None
    ) -> None:
        """`logprobs`: one per choice, by position, or None."""
        super().__init__(answer_id, model, options)
        self._logprobs = logprobs

    def complete(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        return {
            "index": choice.position,
            "text": chunk.text,
            "logprobs": self._logprobs[choice.position].shape(chunk) if self._logprobs else None,
            "finish_reason": chunk.finish_reason,
        }

    piece = complete
