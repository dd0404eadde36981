"""Bodies of the routes of vectors are checked, and their texts become tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rota.core.errors import RequestError
from rota.core.request import Pooling
from rota.server.call_options import CallOptions
from rota.server.embeddings.fields import EmbeddingFields, PooledFields, RerankFields, ScoreFields
from rota.server.fields import read_body
from rota.server.openai.sampling_fields import ModelNames
from rota.server.prompts import Prompts, Texts
from rota.server.reading import AskedModels


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledCall:
    """What a route needs of a body."""

    names: ModelNames
    prompts: Prompts
    pooling: Pooling
    asks: CallOptions
    is_base64: bool = False
    # Pairs of prompts by their positions.
    pairs: tuple[tuple[int, int], ...] = ()
    # Of a rerank: how many results, and the documents if they are to come back.
    most: int | None = None
    documents: tuple[str, ...] | None = None

    @property
    def asked_models(self) -> AskedModels:
        return self.names.asked


def read_embeddings(texts: Texts, raw: bytes) -> PooledCall:
    """Read a body. Raises RequestError for the first field that is wrong."""
    fields = read_body(EmbeddingFields, raw)
    fields.refuse_unsupported()
    prompts = texts.tokenized(fields.input, "input", reading=fields.reading())
    return PooledCall(**_shared(fields), prompts=prompts, is_base64=fields.encoding_format == "base64")


def read_score(texts: Texts, raw: bytes) -> PooledCall:
    """Read a body. Raises RequestError for the first field that is wrong."""
    fields = read_body(ScoreFields, raw)
    fields.refuse_unsupported()
    first = [fields.text_1] if isinstance(fields.text_1, str) else fields.text_1
    second = [fields.text_2] if isinstance(fields.text_2, str) else fields.text_2
    if len(first) not in (1, len(second)):
        message = f"text_1 holds {len(first)} texts and text_2 {len(second)}; send one, or as many as in text_2."
        raise RequestError.bad_field("text_1", message)
    prompts = _tokenized(texts, fields, {"text_1": fields.text_1, "text_2": fields.text_2})
    pairs = tuple((min(index, len(first) - 1), len(first) + index) for index in range(len(second)))
    return PooledCall(**_shared(fields), prompts=prompts, pairs=pairs)


def read_rerank(texts: Texts, raw: bytes) -> PooledCall:
    """Read a body. Raises RequestError for the first field that is wrong."""
    fields = read_body(RerankFields, raw)
    fields.refuse_unsupported()
    prompts = _tokenized(texts, fields, {"query": fields.query, "documents": fields.documents})
    return PooledCall(
        **_shared(fields),
        prompts=prompts,
        pairs=tuple((0, 1 + index) for index in range(len(fields.documents))),
        most=fields.top_n or None,
        documents=None if fields.return_documents is False else tuple(fields.documents),
    )


def _shared(fields: PooledFields) -> dict[str, Any]:
    return {"names": fields.names, "pooling": fields.pooling or "last", "asks": fields.call_options()}


def _tokenized(texts: Texts, fields: PooledFields, given: dict[str, str | list[str]]) -> Prompts:
    """The prompts of all fields, one after another."""
    read = [texts.tokenized(value, param, reading=fields.reading()) for param, value in given.items()]
    tokens = tuple(one for prompts in read for one in prompts.tokens)
    texts.check_count(len(tokens), 1, list(given)[-1])
    return Prompts(tokens, tuple(param for prompts in read for param in prompts.params))
