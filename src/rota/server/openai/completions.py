"""POST /v1/completions continues prompts, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.server.answer import ParsedCall, SentAs, requests_for
from rota.server.choices import Choice, Chunk
from rota.server.fields import read_body
from rota.server.front import Front
from rota.server.openai.bodies import CompletionBody
from rota.server.openai.completion_fields import CompletionFields
from rota.server.openai.logprobs import CompletionLogprobs
from rota.server.openai.sampling_fields import StreamOptions, model_for
from rota.server.openai.shape import OpenAiShape
from rota.server.openapi import gives, takes
from rota.server.prompts import Tokens, check_count, params_of, tokenized
from rota.server.respond import respond
from rota.text.tokenizer import Tokenizer


def install_completions_route(app: FastAPI, front: Front) -> None:
    @app.post("/v1/completions", openapi_extra=takes(CompletionFields), responses=gives(CompletionBody, CompletionBody))
    async def completions(http: HttpRequest) -> Response:
        """Continue prompts."""
        call = front.identify(http)
        fields = read_body(CompletionFields, await http.body())
        model = model_for(front, call, fields)
        fields.refuse_unsupported()
        limit, choices, options = fields.output_limit(), fields.choices(), fields.usage_wanted()
        sampling = fields.params(front.tokenizer.eos_ids)
        prompts = await tokenized(front, fields.prompt)
        check_count(front, len(prompts), choices)
        answer_id = f"cmpl-{call.name}"
        parsed = ParsedCall(
            call,
            answer_id,
            requests_for(call, answer_id, model, prompts, sampling, choices, fields.cache_salt),
            choices,
            openings=tuple(_echoes(front.tokenizer, fields, prompts)) if fields.echo else (),
            has_output=limit > 0,
            sent_as=tuple(SentAs(param, fields.model_param) for param in params_of(fields.prompt)),
            limit_param=fields.limit_param,
        )
        logprobs = None
        if fields.logprobs is not None:
            logprobs = [
                CompletionLogprobs(front.tokenizer.pieces, request.prompt if fields.echo else ())
                for request in parsed.requests
            ]
        shape = CompletionShape(answer_id, model.name, options, logprobs)
        return await respond(front, http, parsed, shape, bool(fields.stream))


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


def _echoes(tokenizer: Tokenizer, fields: CompletionFields, prompts: list[Tokens]) -> list[Chunk]:
    """The prompts that the choices begin with. A prompt sent as text comes back as the same text."""
    given = [fields.prompt] if isinstance(fields.prompt, str) else fields.prompt
    return [
        Chunk(given[index] if isinstance(given[index], str) else tokenizer.decode(tokens))
        for index, tokens in enumerate(prompts)
        for _ in range(fields.choices())
    ]
