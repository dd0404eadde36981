"""The bodies of /v1/embeddings, /v1/score and /v1/rerank."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rota.server.call_options import CallOptions
from rota.server.fields import CacheSalt, Count, Fields, Unsupported, within
from rota.server.openai.sampling_fields import ModelNames
from rota.server.prompts import Prompt, Reading

Texts = Annotated[list[str], Field(fail_fast=True, min_length=1)]


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

    @property
    def names(self) -> ModelNames:
        return ModelNames(self.model, self.lora_path)

    def reading(self) -> Reading:
        return Reading(self.truncate_prompt_tokens, add_special_tokens=self.add_special_tokens is not False)

    def call_options(self) -> CallOptions:
        return CallOptions(cache_salt=self.cache_salt, asker=self.user or self.cache_salt, priority=self.priority)


class EmbeddingFields(PooledFields):
    """Texts to be turned into vectors of length one."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Unsupported = None


class ScoreFields(PooledFields):
    """Pairs of texts: one with each of a list, or two lists of the same length."""

    text_1: str | Texts
    text_2: str | Texts


class RerankFields(PooledFields):
    """Documents to be put in order by how near they are to a query."""

    query: str
    documents: Texts
    top_n: Count | None = within(0)
    return_documents: bool | None = None
    max_tokens_per_doc: Unsupported = None
