"""pydantic-ai: agents with tools and typed output, by chats, by responses and by messages."""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url = sys.argv[1]
with urllib.request.urlopen(f"{url}/v1/models") as listed:
    name = json.load(listed)["data"][0]["id"]
openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
chat, responses = OpenAIChatModel(name, provider=openai), OpenAIResponsesModel(name, provider=openai)
messages = AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key="none"))
settings = {"max_tokens": 200, "temperature": 0.0, "timeout": 300}


class Verdict(BaseModel):
    """Whether a city is warm."""

    city: Literal["Oslo", "Rome"]
    is_warm: bool


def text() -> None:
    for model in (chat, responses, messages):
        assert Agent(model, model_settings=settings | {"max_tokens": 20}).run_sync("Hello!").output


def tool_output() -> None:
    for model in (chat, responses, messages):
        agent = Agent(model, output_type=ToolOutput(Verdict), model_settings=settings)
        assert isinstance(agent.run_sync("Is it warm in Rome?").output, Verdict)


def native_output() -> None:
    for model in (chat, responses):
        agent = Agent(model, output_type=NativeOutput(Verdict), model_settings=settings)
        assert isinstance(agent.run_sync("Is it warm in Rome?").output, Verdict)


def tools() -> None:
    agent = Agent(chat, model_settings=settings | {"max_tokens": 60})

    @agent.tool_plain
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather in a city."""
        return f"It is 30 degrees in {city}."

    assert agent.run_sync("What is the weather in Rome?").output is not None


for part in (text, tool_output, native_output, tools):
    part()
    print(f"{part.__name__}: works", flush=True)
