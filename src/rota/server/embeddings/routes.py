"""Routes that turn texts into vectors: OpenAI's embeddings, vLLM's scores and ranks."""

from __future__ import annotations

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.server.answers.respond import respond
from rota.server.context import AppContext
from rota.server.docs import gives, takes
from rota.server.embeddings.call import (
    EmbeddingFields,
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
)


def install(app: FastAPI, context: AppContext) -> None:
    @app.post("/v1/embeddings", openapi_extra=takes(EmbeddingFields), responses=gives(EmbeddingsBody))
    async def embeddings(http: HttpRequest) -> Response:
        """Texts as vectors of length one, from the last hidden states of the model or adapter."""
        return await respond(context, http, read_embeddings, EmbeddingWriter, "embd-")

    @app.post("/v1/score", openapi_extra=takes(ScoreFields), responses=gives(ScoresBody))
    @app.post("/score", include_in_schema=False)
    async def score(http: HttpRequest) -> Response:
        """How near texts are: the cosine of their vectors, in vLLM's shape."""
        return await respond(context, http, read_score, ScoreWriter, "score-")

    @app.post("/v1/rerank", openapi_extra=takes(RerankFields), responses=gives(RanksBody))
    @app.post("/rerank", include_in_schema=False)
    async def rerank(http: HttpRequest) -> Response:
        """Documents in the order of their nearness to a query, in vLLM's shape."""
        return await respond(context, http, read_rerank, RerankWriter, "rerank-")
