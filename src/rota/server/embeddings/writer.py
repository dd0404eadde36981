"""Routes that turn texts into vectors answer with embeddings as OpenAI's, or with scores and ranks as vLLM's."""

from __future__ import annotations

import base64
import sys
import time
from abc import abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic import BaseModel

from rota.server.access.access import Right
from rota.server.answers.answer import Answer
from rota.server.answers.respond import ResponseWriter, respond
from rota.server.answers.vectors import vector_of
from rota.server.context import AppContext
from rota.server.embeddings.call import (
    EmbeddingFields,
    PooledCall,
    RerankFields,
    ScoreFields,
    read_embeddings,
    read_rerank,
    read_score,
)
from rota.server.route import post
from rota.server.streams import Delta
from rota.text.vectors import Vector, scores

# ── vectors ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Vectors as JSON or as bytes.


def encoded(vector: Vector) -> msgspec.Raw:
    """As JSON."""
    return msgspec.Raw(msgspec.json.encode(vector))


def as_base64(vector: Vector) -> str:
    """32-bit floats, the lowest byte first."""
    packed = array("f", vector)
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode()


# ── bodies ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# The response bodies of the routes of vectors, for /docs.


class PooledUsageBody(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingBody(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsBody(BaseModel):
    """A vector of length one for each text."""

    object: Literal["list"]
    data: list[EmbeddingBody]
    model: str
    usage: PooledUsageBody


class ScoreBody(BaseModel):
    index: int
    object: Literal["score"]
    score: float


class ScoresBody(BaseModel):
    """The cosine of each pair of texts."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreBody]
    usage: PooledUsageBody


class DocumentBody(BaseModel):
    text: str


class RankBody(BaseModel):
    index: int
    relevance_score: float
    document: DocumentBody | None = None


class RanksBody(BaseModel):
    """Documents, the nearest first."""

    id: str
    model: str
    results: list[RankBody]
    usage: PooledUsageBody


# ── shape ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class VectorWriter(ResponseWriter):
    """Subclasses write the body from one vector of length one for each prompt."""

    is_slow = True

    def __init__(self, answer: Answer, call: PooledCall) -> None:
        super().__init__(answer)
        self._id, self._model, self._call = answer.answer_id, answer.model, call

    @abstractmethod
    def body(self, vectors: Sequence[Vector]) -> dict[str, Any]:
        """All but the usage."""

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        vectors = list(map(vector_of, deltas))
        tokens = self.answer.usage.prompt_tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return msgspec.json.encode({**self.body(vectors), "usage": usage})


class EmbeddingWriter(VectorWriter):
    def body(self, vectors: Sequence[Vector]) -> dict[str, Any]:
        # Encoded one by one: the lock is free between two of them, for the tokens of other clients.
        written = [as_base64(vector) if self._call.is_base64 else encoded(vector) for vector in vectors]
        data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(written)]
        return {"object": "list", "data": data, "model": self._model}


class ScoreWriter(VectorWriter):
    def body(self, vectors: Sequence[Vector]) -> dict[str, Any]:
        found = enumerate(scores(vectors, self._call.pairs))
        data = [{"index": index, "object": "score", "score": score} for index, score in found]
        head = {"id": self._id, "object": "list", "created": int(time.time()), "model": self._model}
        return {**head, "data": data}


class RerankWriter(VectorWriter):
    def body(self, vectors: Sequence[Vector]) -> dict[str, Any]:
        """The nearest document first. Documents that are as near stay in their order."""
        near = scores(vectors, self._call.pairs)
        order = sorted(range(len(near)), key=lambda index: -near[index])[: self._call.most]
        documents = self._call.documents
        results = [
            {"index": index, "relevance_score": near[index]}
            | ({"document": {"text": documents[index]}} if documents else {})
            for index in order
        ]
        return {"id": self._id, "model": self._model, "results": results}


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
