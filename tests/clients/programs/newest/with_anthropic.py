"""The `anthropic` package: messages, tools, streams, counts, errors."""

from __future__ import annotations

import json
import sys
import urllib.request

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=300)
with urllib.request.urlopen(f"{sys.argv[1]}/v1/models") as listed:
    model = json.load(listed)["data"][0]["id"]
question = [{"role": "user", "content": "What is the weather in Rome?"}]
schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
once = {"type": "any", "disable_parallel_tool_use": True}
greedy = {"temperature": 0}
tool = {"name": "weather", "description": "The weather in a city.", "input_schema": schema}


def messages() -> None:
    answer = client.messages.create(model=model, max_tokens=20, system="Be brief.", messages=question)
    assert answer.content[0].type == "text"
    assert answer.content[0].text
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens > 0
    more = [*question, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "And in Oslo?"}]
    ended = client.messages.create(model=model, max_tokens=40, messages=more, stop_sequences=[" the", ".", ","])
    assert ended.stop_reason in ("stop_sequence", "end_turn", "max_tokens")


def tools() -> None:
    answer = client.messages.create(
        model=model, max_tokens=200, messages=question, tools=[tool], tool_choice=once, extra_body=greedy
    )
    (use,) = [block for block in answer.content if block.type == "tool_use"]
    assert (answer.stop_reason, use.name) == ("tool_use", "weather")
    assert use.input["city"] in ("Oslo", "Rome")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "30 degrees."}]}
    turns = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(model=model, max_tokens=20, messages=[*question, *turns], tools=[tool])
    assert after.content


def streams() -> None:
    with client.messages.stream(model=model, max_tokens=20, messages=question) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text
    assert text
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    with client.messages.stream(
        model=model, max_tokens=200, messages=question, tools=[tool], tool_choice=choice, extra_body=greedy
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"message_start", "content_block_start", "input_json", "content_block_stop", "message_stop"} <= kinds, kinds
    assert final.content[-1].input["city"] in ("Oslo", "Rome")


def counts() -> None:
    counted = client.messages.count_tokens(model=model, messages=question, tools=[tool])
    plain = client.messages.count_tokens(model=model, messages=question)
    assert counted.input_tokens > plain.input_tokens > 5


def errors() -> None:
    refused = None
    try:
        client.messages.create(model="no-such-model", max_tokens=1, messages=question)
    except anthropic.NotFoundError as error:
        refused = error.body
    assert refused["error"]["type"] == "not_found_error", refused


for part in (messages, tools, streams, counts, errors):
    part()
    print(f"{part.__name__}: works", flush=True)
