"""litellm: chats, streams, tools, schemas, overflow, by the ways of OpenAI, vLLM, Anthropic and Ollama; vectors."""

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
by_vllm = by_openai | {"model": f"hosted_vllm/{model}"}
by_anthropic = {"model": f"anthropic/{model}", "api_base": url, **shared}
by_ollama = {"model": f"ollama_chat/{model}", "api_base": url, **shared}
ways = (by_openai, by_vllm, by_anthropic, by_ollama)


class Verdict(BaseModel):
    is_warm: bool


def chats() -> None:
    for way in ways:
        assert litellm.completion(**way, messages=question, max_tokens=20).choices[0].message.content


def streams() -> None:
    for way in ways:
        chunks = list(litellm.completion(**way, messages=question, max_tokens=20, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def tools() -> None:
    for way in (by_openai, by_vllm, by_anthropic):
        answer = litellm.completion(
            **way, messages=question, tools=[tool], tool_choice="required", temperature=0, max_tokens=300
        ).choices[0]
        call = answer.message.tool_calls[0].function
        assert (answer.finish_reason, call.name) == ("tool_calls", "weather")
        assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")


def schemas() -> None:
    for way in (by_openai, by_vllm, by_ollama):
        answer = litellm.completion(**way, messages=question, response_format=Verdict, temperature=0, max_tokens=200)
        Verdict.model_validate_json(answer.choices[0].message.content)


def overflow() -> None:
    """A prompt beyond the context is what litellm calls an overflow, so that its router asks another model."""
    larger = {"model_name": "larger", "litellm_params": {"model": "openai/larger", "mock_response": "It fits."}}
    messages = [{"role": "user", "content": "rain " * 20_000}]
    for way in (by_openai, by_vllm, by_anthropic):  # litellm knows no overflow of Ollama, which cuts prompts
        here = {"model_name": "here", "litellm_params": {**way, "max_tokens": 20}}
        router = litellm.Router([here, larger], context_window_fallbacks=[{"here": ["larger"]}], num_retries=0)
        assert router.completion("here", messages).choices[0].message.content == "It fits.", way["model"]


def embeddings() -> None:
    for way in (by_openai, by_vllm):
        answer = litellm.embedding(**way, input=["a cat"])
        assert len(answer.data[0]["embedding"]) > 10


def scores() -> None:
    documents = ["Rain in Rome.", "A recipe for soup."]
    ranked = litellm.rerank(**by_vllm, query="weather", documents=documents)
    assert {result["index"] for result in ranked.results} == {0, 1}


for part in (chats, streams, tools, schemas, overflow, embeddings, scores):
    part()
    print(f"{part.__name__}: works", flush=True)
