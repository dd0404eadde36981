"""The `ollama` package: models, chats whole and streamed, tools, schemas, embeddings, errors."""

# No `from __future__ import annotations`: the client reads the annotations of a tool as they stand.

import sys
from typing import Literal

import ollama
from pydantic import BaseModel, ConfigDict

client = ollama.Client(host=sys.argv[1], timeout=300)
model = client.list().models[0].model
question = [{"role": "user", "content": "What is the weather in Rome?"}]
brief = {"num_predict": 20, "temperature": 0}


class Verdict(BaseModel):
    # Without it the schema allows more, and a small model writes more.
    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome"]
    is_warm: bool


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city.

    Args:
        city: the city
    """
    return f"It is 30 degrees in {city}."


def models() -> None:
    assert "pirate" in [listed.model for listed in client.list().models]
    shown = client.show(model)
    assert "completion" in shown.capabilities, shown
    assert model in [running.model for running in client.ps().models]


def chats() -> None:
    answer = client.chat(model, question, options=brief, keep_alive="5m")
    assert answer.message.content
    assert answer.eval_count <= 20
    pieces = list(client.chat(model, question, options=brief, stream=True))
    assert "".join(piece.message.content for piece in pieces) == answer.message.content
    assert pieces[-1].done


def generated() -> None:
    answer = client.generate(model, "The moon is", system="Be brief.", options=brief)
    assert answer.response
    assert client.generate("pirate", "The moon is", options=brief).response != answer.response


def tools() -> None:
    answer = client.chat(model, question, tools=[weather], options={"num_predict": 60, "temperature": 0})
    for call in answer.message.tool_calls or ():
        assert call.function.name == "weather"
    result = {"role": "tool", "tool_name": "weather", "content": weather("Rome")}
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    turns = [*question, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    assert client.chat(model, turns, tools=[weather], options=brief).message.content


def schemas() -> None:
    answer = client.chat(model, question, format=Verdict.model_json_schema(), options={"temperature": 0})
    assert Verdict.model_validate_json(answer.message.content)


def embeddings() -> None:
    vectors = client.embed(model, ["a cat", "a kitten"]).embeddings
    assert len(vectors) == 2
    assert len(vectors[0]) > 10


def errors() -> None:
    refused = None
    try:
        client.chat("no-such-model", question)
    except ollama.ResponseError as error:
        refused = error
    assert refused.status_code == 404
    assert "no-such-model" in refused.error


for part in (models, chats, generated, tools, schemas, embeddings, errors):
    part()
    print(f"{part.__name__}: works", flush=True)
