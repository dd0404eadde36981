"""instructor: objects by tools, by JSON schema, and by Anthropic's tools; partial objects from a stream."""

from __future__ import annotations

import sys
from typing import Literal

import anthropic
import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

plain = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=300)
model = plain.models.list().data[0].id
question = [{"role": "user", "content": "What is the weather in Rome?"}]


class Verdict(BaseModel):
    # Without it the schema allows more, and a small model writes more.
    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome"]
    is_warm: bool


def by_mode(mode: instructor.Mode) -> None:
    client = instructor.from_openai(plain, mode=mode)
    asked = {
        "model": model,
        "messages": question,
        "response_model": Verdict,
        "max_tokens": 200,
        "max_retries": 0,
        "temperature": 0,
    }
    assert isinstance(client.chat.completions.create(**asked), Verdict)


def tools() -> None:
    by_mode(instructor.Mode.TOOLS)


def json_schema() -> None:
    by_mode(instructor.Mode.JSON_SCHEMA)


def partial() -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    parts = list(
        client.chat.completions.create_partial(
            model=model, messages=question, response_model=Verdict, max_tokens=200, max_retries=0, temperature=0
        )
    )
    assert isinstance(parts[-1].is_warm, bool)


def anthropic_tools() -> None:
    own = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=300)
    client = instructor.from_anthropic(own, mode=instructor.Mode.ANTHROPIC_TOOLS)
    asked = {
        "model": model,
        "messages": question,
        "response_model": Verdict,
        "max_tokens": 200,
        "max_retries": 0,
        "extra_body": {"temperature": 0},
    }
    assert isinstance(client.messages.create(**asked), Verdict)


for part in (tools, json_schema, partial, anthropic_tools):
    part()
    print(f"{part.__name__}: works", flush=True)
