"""What is refused is refused by name, with the nearest thing that works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rota.core.errors import RequestError
from rota.server.calls.fields import Fields, Unsupported, unless
from rota.server.calls.known_fields import ADVICE
from rota.server.embeddings.call import EmbeddingFields, RerankFields
from rota.server.messages.call import MessagesFields, TextBlock
from rota.server.native.call import GenerateFields, NativeSampling
from rota.server.ollama.call import OllamaFields
from rota.server.openai.chat_fields import ChatFields, Message
from rota.server.openai.completions import CompletionFields
from rota.server.openai.sampling_fields import StreamOptions
from rota.server.openai.structured_fields import StructuredOutputs
from rota.server.openai.tokenize_routes import TokenizeFields
from rota.server.responses.call import CallItem, ReasoningItem, ResponsesFields
from rota.server.routes.adapters import LoadFields, NativeLoadFields


class Example(Fields):
    color: Unsupported = None
    penalty: Unsupported = unless(1.0)


@pytest.mark.parametrize("sent", [{}, {"color": None}, {"color": False}, {"color": []}, {"penalty": 1}])
def test_a_value_that_asks_for_nothing_is_taken(sent):
    Example(**sent).refuse_unsupported()


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        ({"color": "red"}, "Rota does not support body.color; leave it out."),
        ({"penalty": 2}, "Rota does not support body.penalty other than 1.0; leave it out."),
    ],
)
def test_a_value_that_asks_for_something_is_refused_by_name(sent, sentence):
    with pytest.raises(RequestError) as refusal:
        Example(**sent).refuse_unsupported("body.")
    assert refusal.value.fault.message == sentence
    assert refusal.value.fault.param == f"body.{next(iter(sent))}"


def fields_of_all_bodies() -> Iterator[str]:
    bodies = (ChatFields, Message, CompletionFields, GenerateFields, NativeSampling, TokenizeFields, StreamOptions)
    others = (ResponsesFields, CallItem, ReasoningItem, MessagesFields, TextBlock, OllamaFields, StructuredOutputs)
    for kind in (*bodies, *others, EmbeddingFields, RerankFields, LoadFields, NativeLoadFields):
        yield from kind.model_fields


def test_advice_is_given_for_fields_that_some_body_has():
    assert not ADVICE.keys() - {*fields_of_all_bodies()}
