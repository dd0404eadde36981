"""Haystack: generators of chats and of responses, streams, tools, schemas, embedders, a pipeline that searches."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Literal

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from haystack import Document, Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.dataclasses import ChatMessage
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from pydantic import BaseModel

url = f"{sys.argv[1]}/v1"
with urllib.request.urlopen(f"{url}/models") as listed:
    model = json.load(listed)["data"][0]["id"]
shared = {"model": model, "api_base_url": url, "api_key": Secret.from_token("none"), "max_retries": 0, "timeout": 300}
question = [ChatMessage.from_user("Is it warm in Rome?")]
brief = {"max_completion_tokens": 20, "temperature": 0}
enough = {"max_completion_tokens": 200, "temperature": 0}


class Verdict(BaseModel):
    city: Literal["Oslo", "Rome"]
    is_warm: bool


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return f"It is 30 degrees in {city}."


def chats() -> None:
    (answer,) = OpenAIChatGenerator(**shared, generation_kwargs=brief).run(question)["replies"]
    assert answer.text
    newer = OpenAIResponsesChatGenerator(**shared, generation_kwargs={"max_output_tokens": 20})
    assert newer.run(question)["replies"][0].text


def streams() -> None:
    pieces = []
    streamed = OpenAIChatGenerator(**shared, generation_kwargs=brief, streaming_callback=pieces.append)
    text = streamed.run(question)["replies"][0].text
    assert text
    assert "".join(piece.content for piece in pieces) == text


def tools() -> None:
    once = {**enough, "tool_choice": "required", "parallel_tool_calls": False}
    caller = OpenAIChatGenerator(**shared, generation_kwargs=once, tools=[create_tool_from_function(weather)])
    (reply,) = caller.run(question)["replies"]
    (call,) = reply.tool_calls
    assert (call.tool_name, set(call.arguments)) == ("weather", {"city"})
    result = ChatMessage.from_tool(tool_result=weather(**call.arguments), origin=call)
    after = OpenAIChatGenerator(**shared, generation_kwargs=brief).run([*question, reply, result])
    assert after["replies"][0].text


def schemas() -> None:
    typed = OpenAIChatGenerator(**shared, generation_kwargs={**enough, "response_format": Verdict})
    assert Verdict.model_validate_json(typed.run(question)["replies"][0].text)


def search() -> None:
    store = InMemoryDocumentStore()
    documents = [Document(content="It is warm in Rome."), Document(content="Soup needs salt.")]
    store.write_documents(OpenAIDocumentEmbedder(**shared, progress_bar=False).run(documents)["documents"])
    told = "Answer by this: {{documents[0].content}} Question: {{question}}"
    steps = Pipeline()
    steps.add_component("embedder", OpenAITextEmbedder(**shared))
    steps.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=1))
    steps.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user(told)], required_variables="*"))
    steps.add_component("chat", OpenAIChatGenerator(**shared, generation_kwargs=brief))
    steps.connect("embedder.embedding", "retriever.query_embedding")
    steps.connect("retriever.documents", "prompt.documents")
    steps.connect("prompt.prompt", "chat.messages")
    asked = question[0].text
    assert steps.run({"embedder": {"text": asked}, "prompt": {"question": asked}})["chat"]["replies"][0].text


for part in (chats, streams, tools, schemas, search):
    part()
    print(f"{part.__name__}: works", flush=True)
