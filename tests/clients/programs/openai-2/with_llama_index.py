"""LlamaIndex: chats, completions, streams, tools, typed answers, vectors and a search by them; Ollama's routes too."""

# No `from __future__ import annotations`: LlamaIndex reads the annotations of a tool as they stand.

import json
import sys
import urllib.request
from typing import Literal

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict

url = sys.argv[1]
with urllib.request.urlopen(f"{url}/v1/models") as listed:
    model = json.load(listed)["data"][0]["id"]
shared = {"model": model, "api_base": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 300.0}
chat = OpenAILike(
    **shared, context_window=8192, max_tokens=100, temperature=0.0, is_chat_model=True, is_function_calling_model=True
)
brief = OpenAILike(**shared, context_window=8192, max_tokens=20, temperature=0.0, is_chat_model=True)
question = ChatMessage(role="user", content="What is the weather in Rome?")


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return f"It is 30 degrees in {city}."


class Verdict(BaseModel):
    """Whether a city is warm."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome"]
    is_warm: bool


def chats() -> None:
    assert brief.chat([question]).message.content
    assert "".join(piece.delta or "" for piece in brief.stream_chat([question]))


def completions() -> None:
    plain = OpenAILike(**shared, max_tokens=20, temperature=0.0)
    assert plain.complete("The moon is").text


def tools() -> None:
    tool = FunctionTool.from_defaults(weather)
    answer = chat.chat_with_tools([tool], chat_history=[question], tool_required=True)
    calls = chat.get_tool_calls_from_response(answer)
    assert calls[0].tool_name == "weather"
    assert calls[0].tool_kwargs["city"] in ("Oslo", "Rome")


def typed() -> None:
    assert isinstance(chat.as_structured_llm(Verdict).chat([question]).raw, Verdict)


def search() -> None:
    vectors = OpenAILikeEmbedding(model_name=model, api_base=f"{url}/v1", api_key="none", max_retries=0, timeout=300.0)
    documents = [Document(text="It is warm in Rome."), Document(text="Soup needs salt.")]
    index = VectorStoreIndex.from_documents(documents, embed_model=vectors)
    assert index.as_query_engine(llm=brief, similarity_top_k=1).query("Is it warm in Rome?").source_nodes


def by_ollama() -> None:
    other = Ollama(
        model=model, base_url=url, request_timeout=300.0, context_window=8192, additional_kwargs={"num_predict": 20}
    )
    assert other.chat([question]).message.content
    assert "".join(piece.delta or "" for piece in other.stream_chat([question]))


for part in (chats, completions, tools, typed, search, by_ollama):
    part()
    print(f"{part.__name__}: works", flush=True)
