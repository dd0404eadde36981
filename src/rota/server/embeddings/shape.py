"""The answers of the routes of vectors: embeddings as OpenAI's, scores and ranks as vLLM's."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from rota.core.errors import Fault, FaultCode, RequestError
from rota.server.answer import Answer, Part
from rota.server.embeddings.call import PooledCall
from rota.server.embeddings.vectors import Vector, as_base64, cosine, encoded, normalised
from rota.server.shape import OnlyWhole


class VectorShape(OnlyWhole):
    """Subclasses write the body from one vector of length one for each prompt."""

    def __init__(self, answer_id: str, model: str, read: PooledCall) -> None:
        self._id, self._model, self._read = answer_id, model, read

    @abstractmethod
    def body(self, vectors: Sequence[Vector]) -> dict[str, Any]:
        """All but the usage."""

    def whole(self, answer: Answer, parts: Sequence[Part]) -> bytes:
        found = {part.choice.position: part.chunk.embedding for part in parts if part.chunk.finish_reason}
        vectors = [_checked(found[position]) for position in range(len(found))]
        tokens = answer.usage.prompt_tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return msgspec.json.encode({**self.body(vectors), "usage": usage})


def _checked(vector: Vector | None) -> Vector:
    if vector is None:
        raise RequestError(Fault(FaultCode.STOPPING, "The request was aborted before its vector was there."))
    return normalised(vector)


class EmbeddingShape(VectorShape):
    def body(self, vectors: Sequence[Vector]) -> dict[str, Any]:
        # Encoded one by one: the lock is free between two of them, for the tokens of other clients.
        written = [as_base64(vector) if self._read.is_base64 else encoded(vector) for vector in vectors]
        data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(written)]
        return {"object": "list", "data": data, "model": self._model}


class ScoreShape(VectorShape):
    def body(self, vectors: Sequence[Vector]) -> dict[str, Any]:
        scores = [cosine(vectors[one], vectors[other]) for one, other in self._read.pairs]
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        head = {"id": self._id, "object": "list", "created": int(time.time()), "model": self._model}
        return {**head, "data": data}


class RerankShape(VectorShape):
    def body(self, vectors: Sequence[Vector]) -> dict[str, Any]:
        """The nearest document first. Documents that are as near stay in their order."""
        scores = [cosine(vectors[one], vectors[other]) for one, other in self._read.pairs]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._read.most]
        documents = self._read.documents
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": documents[index]}} if documents else {})
            for index in order
        ]
        return {"id": self._id, "model": self._model, "results": results}
