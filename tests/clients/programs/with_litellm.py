"""litellm: chats, streams, tools, schemas, by OpenAI's and by Anthropic's route; embeddings."""

from __future__ import annotations

import json
import os
import sys
import urllib.request

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no question to another server

import litellm
from pydantic import BaseModel

url = sys.argv[1]
with urllib.request.urlopen(f"{url}/v1/models") as listed:
    model = json.load(listed)["data"][0]["id"]
question = [{"role": "user", "content": "What is the weather in Rome?"}]
schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
tool = {"type": "function", "function": {"name": "weather", "description": "A city's weather.", "parameters": schema}}
shared = {"api_key": "none", "num_retries": 0, "timeout": 300}
by_openai = {"model": f"openai/{model}", "api_base": f"{url}/v1", **shared}
by_anthropic = {"model": f"anthropic/{model}", "api_base": url, **shared}


class Verdict(BaseModel):
    is_warm: bool


def chats() -> None:
    for way in (by_openai, by_anthropic):
        assert litellm.completion(**way, messages=question, max_tokens=20).choices[0].message.content


def streams() -> None:
    for way in (by_openai, by_anthropic):
        chunks = list(litellm.completion(**way, messages=question, max_tokens=20, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def tools() -> None:
    for way in (by_openai, by_anthropic):
        answer = litellm.completion(
            **way, messages=question, tools=[tool], tool_choice="required", temperature=0, max_tokens=300
        ).choices[0]
        call = answer.message.tool_calls[0].function
        assert (answer.finish_reason, call.name) == ("tool_calls", "weather")
        assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")


def schemas() -> None:
    answer = litellm.completion(**by_openai, messages=question, response_format=Verdict, temperature=0, max_tokens=200)
    Verdict.model_validate_json(answer.choices[0].message.content)


def embeddings() -> None:
    answer = litellm.embedding(**by_openai, input=["a cat"])
    assert len(answer.data[0]["embedding"]) > 10


for part in (chats, streams, tools, schemas, embeddings):
    part()
    print(f"{part.__name__}: works", flush=True)
