"""The response bodies of the routes of vectors, for /docs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


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
