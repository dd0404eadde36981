"""langchain-ollama: chats, streams, tools, structured output, completions, embeddings."""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from pydantic import BaseModel, ConfigDict

with urllib.request.urlopen(f"{sys.argv[1]}/v1/models") as listed:
    model = json.load(listed)["data"][0]["id"]
shared = {"model": model, "base_url": sys.argv[1], "client_kwargs": {"timeout": 300}}
chat = ChatOllama(**shared, temperature=0, num_predict=200, validate_model_on_init=True)
brief = ChatOllama(**shared, temperature=0, num_predict=20)
question = HumanMessage("What is the weather in Rome?")


@tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return f"It is 30 degrees in {city}."


class Verdict(BaseModel):
    """Whether a city is warm."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome"]
    is_warm: bool


def chats() -> None:
    answer = brief.invoke([question])
    assert answer.text
    assert answer.usage_metadata["output_tokens"] <= 20
    assert "".join(chunk.text for chunk in brief.stream([question])) == answer.text


def tools() -> None:
    said = brief.bind_tools([weather]).invoke([question])
    assert all(call["name"] == "weather" for call in said.tool_calls)


def structured() -> None:
    assert isinstance(chat.with_structured_output(Verdict, method="json_schema").invoke([question]), Verdict)


def completions() -> None:
    assert OllamaLLM(**shared, num_predict=20).invoke("The moon is")


def embeddings() -> None:
    assert len(OllamaEmbeddings(**shared).embed_query("a cat")) > 10


for part in (chats, tools, structured, completions, embeddings):
    part()
    print(f"{part.__name__}: works", flush=True)
