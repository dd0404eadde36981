"""Routes that turn texts into vectors: OpenAI's embeddings, vLLM's scores and ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.core.request import SamplingParams
from rota.server.answers.answer import ParsedCall, SentAs, requests_for
from rota.server.answers.respond import respond
from rota.server.calls.reading_room import Work
from rota.server.context import AppContext
from rota.server.docs import gives, takes
from rota.server.embeddings.call import (
    EmbeddingFields,
    PooledCall,
    RerankFields,
    ScoreFields,
    read_embeddings,
    read_rerank,
    read_score,
)
from rota.server.embeddings.writer import (
    EmbeddingsBody,
    EmbeddingWriter,
    RanksBody,
    RerankWriter,
    ScoresBody,
    ScoreWriter,
    VectorWriter,
)
from rota.server.openai.sampling_fields import model_for

# No token is drawn, and the field must have a value.
_SAMPLING = SamplingParams(max_new_tokens=1, temperature=0.0)

MakeWriter = Callable[[str, str, PooledCall], VectorWriter]


def install(app: FastAPI, context: AppContext) -> None:
    @app.post("/v1/embeddings", openapi_extra=takes(EmbeddingFields), responses=gives(EmbeddingsBody))
    async def embeddings(http: HttpRequest) -> Response:
        """Texts as vectors of length one, from the last hidden states of the model or adapter."""
        return await _answer(context, http, read_embeddings, "embd", EmbeddingWriter)

    @app.post("/v1/score", openapi_extra=takes(ScoreFields), responses=gives(ScoresBody))
    @app.post("/score", include_in_schema=False)
    async def score(http: HttpRequest) -> Response:
        """How near texts are: the cosine of their vectors, in vLLM's shape."""
        return await _answer(context, http, read_score, "score", ScoreWriter)

    @app.post("/v1/rerank", openapi_extra=takes(RerankFields), responses=gives(RanksBody))
    @app.post("/rerank", include_in_schema=False)
    async def rerank(http: HttpRequest) -> Response:
        """Documents in the order of their nearness to a query, in vLLM's shape."""
        return await _answer(context, http, read_rerank, "rerank", RerankWriter)


async def _answer(
    context: AppContext, http: HttpRequest, work: Work[PooledCall], prefix: str, make_writer: MakeWriter
) -> Response:
    call = context.identify(http)
    read = await context.read(call.key, http, work)
    model = model_for(context, call, read.names, read.call_options)
    answer_id = f"{prefix}-{call.name}"
    requests = requests_for(call, answer_id, model, read.prompts.tokens, _SAMPLING, 1, read.call_options)
    parsed = ParsedCall(
        call,
        answer_id,
        tuple(replace(request, pooling=read.pooling) for request in requests),
        has_output=False,
        sent_as=tuple(SentAs(param, read.names.param) for param in read.prompts.params),
        limit_param=None,
        chosen=(model,) * len(requests),
    )
    return await respond(context, http, parsed, make_writer(answer_id, model.adapter.name, read), is_streamed=False)
