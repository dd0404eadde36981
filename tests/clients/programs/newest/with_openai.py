"""The `openai` package: tools, parsed answers, streams with its helpers, responses, embeddings."""

from __future__ import annotations

import json
import sys
from enum import StrEnum

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel


class City(StrEnum):
    oslo = "Oslo"
    rome = "Rome"


class Weather(BaseModel):
    """The weather in a city."""

    city: City


class Verdict(BaseModel):
    city: City
    is_warm: bool


client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=300)
model = client.models.list().data[0].id
question = [{"role": "user", "content": "What is the weather in Rome?"}]
tool = pydantic_function_tool(Weather, name="weather")
one_call = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
flat = {"type": "function", "name": "weather", "strict": True, "parameters": tool["function"]["parameters"]}


def chat_with_tools() -> None:
    answer = client.chat.completions.create(model=model, messages=question, tools=[tool], **one_call, max_tokens=200)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls", answer
    (call,) = message.tool_calls
    assert (call.function.name, set(json.loads(call.function.arguments))) == ("weather", {"city"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is 30 degrees and sunny."}
    after = client.chat.completions.create(model=model, messages=[*question, message, result], max_tokens=20)
    assert after.choices[0].message.content
    several = client.chat.completions.create(
        model=model, messages=question, tools=[tool], tool_choice="required", temperature=0, max_tokens=300
    )
    assert all(call.function.name == "weather" for call in several.choices[0].message.tool_calls)


def chat_parsed() -> None:
    parsed = client.chat.completions.parse(
        model=model, messages=question, response_format=Verdict, temperature=0, max_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Verdict)
    called = client.chat.completions.parse(
        model=model,
        messages=question,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        temperature=0,
        max_tokens=200,
    )
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)


def chat_streamed() -> None:
    with client.chat.completions.stream(
        model=model, messages=question, tools=[tool], **one_call, max_tokens=200
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds, kinds
    assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)
    with client.chat.completions.stream(
        model=model, messages=question, response_format=Verdict, temperature=0, max_tokens=200
    ) as stream:
        assert any(event.type == "content.done" for event in stream)
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Verdict)


def responses() -> None:
    answer = client.responses.create(model=model, input=question, tools=[flat], **one_call, max_output_tokens=200)
    calls = [item for item in answer.output if item.type == "function_call"]
    assert (answer.status, calls[0].name, set(json.loads(calls[0].arguments))) == ("completed", "weather", {"city"})
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "It is 30 degrees and sunny."}
    after = client.responses.create(
        model=model, input=[*question, *answer.output, result], instructions="Be brief.", max_output_tokens=20
    )
    assert after.output_text
    parsed = client.responses.parse(
        model=model, input=question, text_format=Verdict, temperature=0, max_output_tokens=200
    )
    assert isinstance(parsed.output_parsed, Verdict)


def responses_streamed() -> None:
    with client.responses.stream(
        model=model, input=question, tools=[flat], **one_call, max_output_tokens=200
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created", kinds
    assert "response.function_call_arguments.delta" in kinds, kinds
    assert final.output[-1].type == "function_call"
    with client.responses.stream(
        model=model, input=question, text_format=Verdict, temperature=0, max_output_tokens=200
    ) as stream:
        assert any(event.type == "response.output_text.delta" for event in stream)
        assert isinstance(stream.get_final_response().output_parsed, Verdict)


def embeddings() -> None:
    answer = client.embeddings.create(model=model, input=["a cat", "a kitten"])
    lengths = [sum(value * value for value in entry.embedding) for entry in answer.data]
    assert all(abs(length - 1) < 1e-3 for length in lengths), lengths


for part in (chat_with_tools, chat_parsed, chat_streamed, responses, responses_streamed, embeddings):
    part()
    print(f"{part.__name__}: works", flush=True)
