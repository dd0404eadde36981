"""Routes that turn texts into vectors: OpenAI's embeddings, vLLM's scores and ranks."""

from __future__ import annotations

from fastapi import Request as HttpRequest
from fastapi import Response

from rota.server.access.access import Right
from rota.server.answers.respond import respond
from rota.server.context import AppContext
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
from rota.server.route import post


async def embeddings(context: AppContext, http: HttpRequest) -> Response:
    """Texts as vectors of length one, from the last hidden states of the model or adapter."""
    return await respond(context, http, read_embeddings, EmbeddingWriter, "embd-")


async def score(context: AppContext, http: HttpRequest) -> Response:
    """How near texts are: the cosine of their vectors, in vLLM's shape."""
    return await respond(context, http, read_score, ScoreWriter, "score-")


async def rerank(context: AppContext, http: HttpRequest) -> Response:
    """Documents in the order of their nearness to a query, in vLLM's shape."""
    return await respond(context, http, read_rerank, RerankWriter, "rerank-")


ROUTES = (
    post("/v1/embeddings", Right.MODEL, embeddings, EmbeddingFields, EmbeddingsBody),
    post("/v1/score", Right.MODEL, score, ScoreFields, ScoresBody, also=("POST /score",)),
    post("/v1/rerank", Right.MODEL, rerank, RerankFields, RanksBody, also=("POST /rerank",)),
)
