"""Bodies of the routes of vectors are checked, and their texts become tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from rota.core.request import SamplingParams
from rota.server.calls.call import Call, ModelNames
from rota.server.calls.fields import CacheSalt, Count, Fields, Unsupported, read_body, within
from rota.server.calls.prompts import CallPrompts, Prompt, PromptReading, Texts
from rota.text.vectors import Pairs, pairs_of

# ── fields ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# The bodies of /v1/embeddings, /v1/score and /v1/rerank.

SomeTexts = Annotated[list[str], Field(fail_fast=True, min_length=1)]


class PooledFields(Fields):
    """What the three routes share. `pooling` says which hidden states make the vector: the last, or the mean of all."""

    model: str | None = None
    lora_path: str | None = None
    pooling: Literal["last", "mean"] | None = None
    cache_salt: CacheSalt | None = None
    priority: Count | None = None
    # The client's own user, who stays with one target of a traffic route.
    user: str | None = None
    truncate_prompt_tokens: Count | None = within(-1)
    add_special_tokens: bool | None = None

    def reading(self) -> PromptReading:
        return PromptReading(self.truncate_prompt_tokens, add_special_tokens=self.add_special_tokens is not False)

    def shared(self) -> dict[str, Any]:
        """The parts of a call that the three routes read alike. No token is drawn, and sampling must have a value."""
        return {
            "models": (ModelNames.of(self.model, self.lora_path),),
            "samplings": (SamplingParams(max_new_tokens=1, temperature=0.0),),
            "pooling": self.pooling or "last",
            "has_output": False,
            "cache_salt": self.cache_salt,
            "asker": self.user or self.cache_salt,
            "priority": self.priority,
        }


class EmbeddingFields(PooledFields):
    """Texts to be turned into vectors of length one."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Unsupported = None


class ScoreFields(PooledFields):
    """Pairs of texts: one with each of a list, or two lists of the same length."""

    text_1: str | SomeTexts
    text_2: str | SomeTexts


class RerankFields(PooledFields):
    """Documents to be put in order by how near they are to a query."""

    query: str
    documents: SomeTexts
    top_n: Count | None = within(0)
    return_documents: bool | None = None
    max_tokens_per_doc: Unsupported = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledCall(Call):
    """Prompts of which vectors are wanted, or what follows from their vectors."""

    is_base64: bool = False
    # Pairs of prompts by their positions.
    pairs: Pairs = ()
    # Of a rerank: how many results, and the documents if they are to come back.
    most: int | None = None
    documents: tuple[str, ...] | None = None


def read_embeddings(texts: Texts, raw: bytes) -> PooledCall:
    """Read a body. Raises RequestError for the first field that is wrong."""
    fields = read_body(EmbeddingFields, raw)
    fields.refuse_unsupported()
    prompts = texts.tokenized(fields.input, "input", reading=fields.reading())
    return PooledCall(**fields.shared(), prompts=prompts, is_base64=fields.encoding_format == "base64")


def read_score(texts: Texts, raw: bytes) -> PooledCall:
    """Read a body. Raises RequestError for the first field that is wrong."""
    fields = read_body(ScoreFields, raw)
    fields.refuse_unsupported()
    first, second = (1 if isinstance(one, str) else len(one) for one in (fields.text_1, fields.text_2))
    pairs = pairs_of(first, second)
    prompts = _tokenized(texts, fields, {"text_1": fields.text_1, "text_2": fields.text_2})
    return PooledCall(**fields.shared(), prompts=prompts, pairs=pairs)


def read_rerank(texts: Texts, raw: bytes) -> PooledCall:
    """Read a body. Raises RequestError for the first field that is wrong."""
    fields = read_body(RerankFields, raw)
    fields.refuse_unsupported()
    prompts = _tokenized(texts, fields, {"query": fields.query, "documents": fields.documents})
    return PooledCall(
        **fields.shared(),
        prompts=prompts,
        pairs=pairs_of(1, len(fields.documents)),
        most=fields.top_n or None,
        documents=None if fields.return_documents is False else tuple(fields.documents),
    )


def _tokenized(texts: Texts, fields: PooledFields, given: dict[str, str | list[str]]) -> CallPrompts:
    """The prompts of all fields, one after another."""
    read = [texts.tokenized(value, param, reading=fields.reading()) for param, value in given.items()]
    tokens = tuple(one for prompts in read for one in prompts.tokens)
    texts.check_count(len(tokens), 1, list(given)[-1])
    return CallPrompts(tokens, tuple(param for prompts in read for param in prompts.params))
