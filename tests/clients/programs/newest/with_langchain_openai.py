"""langchain-openai: tools, structured output, streams, responses, embeddings, agents, and a fallback for overflow."""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict, Field

url = f"{sys.argv[1]}/v1"
with urllib.request.urlopen(f"{url}/models") as listed:
    model = json.load(listed)["data"][0]["id"]
shared = {"model": model, "base_url": url, "api_key": "none", "max_retries": 0, "timeout": 300}
chat = ChatOpenAI(**shared, max_tokens=200, temperature=0)
question = HumanMessage("What is the weather in Rome?")
one_call = {"strict": True, "parallel_tool_calls": False}


@tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return f"It is 30 degrees in {city}."


class Verdict(BaseModel):
    """Whether a city is warm."""

    # Without it the schema allows more, and a small model writes more.
    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome"]
    is_warm: bool = Field(description="above 20 degrees")


def bind_tools() -> None:
    bound = chat.bind_tools([weather], tool_choice="any", **one_call)
    said = bound.invoke([question])
    (call,) = said.tool_calls
    assert call["name"] == "weather"
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert chat.bind(max_tokens=20).invoke([question, said, result]).content
    assert chat.bind_tools([weather]).bind(max_tokens=20).invoke([question])


def structured() -> None:
    for method in ("function_calling", "json_schema"):
        assert isinstance(chat.with_structured_output(Verdict, method=method).invoke([question]), Verdict), method
    # In this mode the model may write any object, so that it is told which.
    told = HumanMessage('Repeat this JSON and nothing else: {"city": "Rome", "is_warm": true}')
    assert isinstance(chat.with_structured_output(Verdict, method="json_mode").invoke([told]), Verdict)


def streams() -> None:
    assert "".join(chunk.text for chunk in chat.bind(max_tokens=20).stream([question]))
    pieces = list(chat.bind_tools([weather], tool_choice="weather", **one_call).stream([question]))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.tool_calls[0]["args"]["city"] in ("Oslo", "Rome")


def responses() -> None:
    newer = ChatOpenAI(**shared, max_tokens=200, temperature=0, use_responses_api=True)
    assert newer.bind(max_tokens=20).invoke([question]).text
    assert newer.bind_tools([weather], tool_choice="weather", **one_call).invoke([question]).tool_calls
    assert isinstance(newer.with_structured_output(Verdict, method="json_schema").invoke([question]), Verdict)


def embeddings() -> None:
    # Texts, not tokens of OpenAI's own vocabulary.
    maker = OpenAIEmbeddings(**shared, check_embedding_ctx_length=False)
    assert len(maker.embed_query("a cat")) > 10


def agents() -> None:
    brief = ChatOpenAI(**shared, max_tokens=40, temperature=0)
    # A small model may call again and again.
    few_turns = ModelCallLimitMiddleware(run_limit=2, exit_behavior="end")
    agent = create_agent(brief, tools=[weather], system_prompt="Be brief.", middleware=[few_turns])
    assert agent.invoke({"messages": [question]})["messages"][-1].type == "ai"
    typed = create_agent(chat, tools=[], response_format=ProviderStrategy(Verdict), middleware=[few_turns])
    assert isinstance(typed.invoke({"messages": [question]})["structured_response"], Verdict)


def overflow() -> None:
    """A prompt beyond the context is what LangChain calls an overflow, so that its fallback sends less."""
    newer = ChatOpenAI(**shared, max_tokens=20, use_responses_api=True)
    for asked in (chat.bind(max_tokens=20), newer):
        shorter = RunnableLambda(lambda messages: messages[-1:]) | asked
        careful = asked.with_fallbacks([shorter], exceptions_to_handle=(ContextOverflowError,))
        assert careful.invoke([HumanMessage("rain " * 20_000), question]).text


for part in (bind_tools, structured, streams, responses, embeddings, agents, overflow):
    part()
    print(f"{part.__name__}: works", flush=True)
