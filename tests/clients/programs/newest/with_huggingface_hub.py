"""huggingface_hub: chats, streams, tools, schemas, by InferenceClient."""

from __future__ import annotations

import json
import sys
import urllib.request

from huggingface_hub import InferenceClient

with urllib.request.urlopen(f"{sys.argv[1]}/v1/models") as listed:
    model = json.load(listed)["data"][0]["id"]
client = InferenceClient(base_url=sys.argv[1], api_key="none", timeout=300)
question = [{"role": "user", "content": "What is the weather in Rome?"}]
schema = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
tool = {"type": "function", "function": {"name": "weather", "description": "A city's weather.", "parameters": schema}}


def chats() -> None:
    answer = client.chat_completion(question, model=model, max_tokens=20, temperature=0.5, seed=1)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 20
    compatible = client.chat.completions.create(model="pirate", messages=question, max_tokens=20)
    assert compatible.choices[0].message.content


def streams() -> None:
    options = {"include_usage": True}
    pieces = list(client.chat_completion(question, model=model, max_tokens=20, stream=True, stream_options=options))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert pieces[-1].usage.completion_tokens > 0


def tools() -> None:
    answer = client.chat_completion(question, model=model, max_tokens=200, tools=[tool], tool_choice="required")
    call = answer.choices[0].message.tool_calls[0].function
    assert (call.name, set(json.loads(call.arguments))) == ("weather", {"city"})


def schemas() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema, "strict": True}}
    answer = client.chat_completion(question, model=model, max_tokens=200, response_format=wanted)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Oslo", "Rome")


for part in (chats, streams, tools, schemas):
    part()
    print(f"{part.__name__}: works", flush=True)
