"""langchain-anthropic: messages, streams, tools, structured output, and a fallback for overflow."""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from pydantic import BaseModel, ConfigDict

with urllib.request.urlopen(f"{sys.argv[1]}/v1/models") as listed:
    model = json.load(listed)["data"][0]["id"]
shared = {"model": model, "base_url": sys.argv[1], "api_key": "none", "max_retries": 0, "timeout": 300}
chat = ChatAnthropic(**shared, max_tokens=200, temperature=0)
brief = ChatAnthropic(**shared, max_tokens=20, temperature=0)
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


def messages() -> None:
    answer = brief.invoke([SystemMessage("Be brief."), question])
    assert answer.text
    assert answer.usage_metadata["output_tokens"] <= 20
    assert "".join(chunk.text for chunk in brief.stream([question]))


def tools() -> None:
    said = chat.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke([question])
    (call,) = said.tool_calls
    assert call["args"]["city"] in ("Oslo", "Rome")
    assert brief.bind_tools([weather]).invoke([question, said, weather.invoke(call)]).content is not None


def structured() -> None:
    for method in ("function_calling", "json_schema"):
        assert isinstance(chat.with_structured_output(Verdict, method=method).invoke([question]), Verdict), method


def overflow() -> None:
    """A prompt beyond the context is what LangChain calls an overflow, so that its fallback sends less."""
    shorter = RunnableLambda(lambda messages: messages[-1:]) | brief
    careful = brief.with_fallbacks([shorter], exceptions_to_handle=(ContextOverflowError,))
    assert careful.invoke([HumanMessage("rain " * 20_000), question]).text


for part in (messages, tools, structured, overflow):
    part()
    print(f"{part.__name__}: works", flush=True)
