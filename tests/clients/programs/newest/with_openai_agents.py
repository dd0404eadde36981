"""openai-agents: agents with tools, streams and typed output, by chats and by responses."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

url = f"{sys.argv[1]}/v1"
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300)
# The answers of this adapter are short, and an answer that is cut is an error to this client.
models = (OpenAIChatCompletionsModel("pirate", client), OpenAIResponsesModel("pirate", client))
question = "What is the weather in Rome?"
enough = ModelSettings(temperature=0, max_tokens=200)
asked_cities: list[str] = []


@function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    asked_cities.append(city)
    return f"It is 30 degrees in {city}."


class Verdict(BaseModel):
    city: Literal["Oslo", "Rome"]
    is_warm: bool


async def texts() -> None:
    for model in models:
        agent = Agent("brief", instructions="Be brief.", model=model, model_settings=enough)
        assert (await Runner.run(agent, question)).final_output


async def streams() -> None:
    for model in models:
        run = Runner.run_streamed(Agent("brief", model=model, model_settings=enough), question)
        kinds = {event.data.type async for event in run.stream_events() if event.type == "raw_response_event"}
        assert "response.output_text.delta" in kinds, kinds
        assert run.final_output


async def tools() -> None:
    for model in models:
        asked_cities.clear()
        must = ModelSettings(temperature=0, max_tokens=200, tool_choice="weather", parallel_tool_calls=False)
        agent = Agent("forecaster", model=model, model_settings=must, tools=[weather])
        assert (await Runner.run(agent, question)).final_output
        assert set(asked_cities) <= {"Oslo", "Rome"}
        assert asked_cities


async def typed() -> None:
    for model in models:
        agent = Agent("judge", model=model, model_settings=enough, output_type=Verdict)
        assert isinstance((await Runner.run(agent, question)).final_output, Verdict)


async def main() -> None:
    for part in (texts, streams, tools, typed):
        await part()
        print(f"{part.__name__}: works", flush=True)


asyncio.run(main())
