"""smolagents: a model's texts, streams and calls; agents that call tools and that write code."""

from __future__ import annotations

import json
import sys
import urllib.request

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

url = f"{sys.argv[1]}/v1"
with urllib.request.urlopen(f"{url}/models") as listed:
    name = json.load(listed)["data"][0]["id"]
shared = {"model_id": name, "api_base": url, "api_key": "none", "client_kwargs": {"max_retries": 0, "timeout": 300}}
brief = OpenAIModel(**shared, max_tokens=40, temperature=0)
question = [{"role": "user", "content": [{"type": "text", "text": "What is the weather in Rome?"}]}]


@tool
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: the city
    """
    return f"It is 30 degrees in {city}."


def texts() -> None:
    answer = brief(question, stop_sequences=["Observation:"])
    assert answer.content
    assert answer.token_usage.output_tokens <= 40


def streams() -> None:
    assert "".join(piece.content or "" for piece in brief.generate_stream(question))


def calls() -> None:
    answer = brief(question, tools_to_call_from=[weather])
    assert answer.tool_calls[0].function.name == "weather"


def agents() -> None:
    """A small model seldom solves a task; the steps that it takes are sound."""
    for kind in (ToolCallingAgent, CodeAgent):
        agent = kind(tools=[weather], model=brief, max_steps=1, verbosity_level=0)
        result = agent.run("What is the weather in Rome?", return_full_result=True)
        assert result.token_usage.output_tokens > 0
        assert not any("Error in generating model output" in str(step.get("error")) for step in result.steps)


for part in (texts, streams, calls, agents):
    part()
    print(f"{part.__name__}: works", flush=True)
