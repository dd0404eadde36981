"""POST /generate continues prompts, in SGLang's shape."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.core.errors import RequestError
from rota.core.request import Request, SamplingParams
from rota.runtime.seeds import seeded
from rota.server.answer import ParsedCall, SentAs
from rota.server.fields import read_body
from rota.server.front import Front
from rota.server.names import checked_name, keep_name
from rota.server.native.bodies import GenerateBody, GeneratedBody
from rota.server.native.fields import GenerateFields, NativeSampling
from rota.server.native.shape import GenerateShape, LogprobFormat
from rota.server.open_answers import Call, name_of, request_id_for
from rota.server.openapi import gives, takes
from rota.server.prompts import check_count, params_of, tokenized
from rota.server.respond import respond

Value = TypeVar("Value")


def install_generate_route(app: FastAPI, front: Front) -> None:
    @app.post("/generate", openapi_extra=takes(GenerateFields), responses=gives(GenerateBody, GeneratedBody))
    async def generate(http: HttpRequest) -> Response:
        """Continue prompts, in SGLang's shape: one object, or a list of them for a list of prompts."""
        call = front.identify(http)
        fields = read_body(GenerateFields, await http.body())
        fields.refuse_unsupported()
        if isinstance(fields.rid, str):
            call = replace(call, name=keep_name(http, checked_name("rid", fields.rid)))
        parsed = await _parse(front, call, fields)
        front.answers.check_free(call.key, set(map(name_of, parsed.requests)))
        is_list = fields.is_list or parsed.choices_per_prompt > 1
        shape = GenerateShape(parsed.requests, is_list, _logprob_format(front, fields))
        return await respond(front, http, parsed, shape, bool(fields.stream))


def _logprob_format(front: Front, fields: GenerateFields) -> LogprobFormat | None:
    if not fields.return_logprob:
        return None
    return LogprobFormat(front.tokenizer.pieces, bool(fields.top_logprobs_num), bool(fields.return_text_in_logprobs))


async def _parse(front: Front, call: Call, fields: GenerateFields) -> ParsedCall:
    """One request per choice of each prompt."""
    prompts = await tokenized(front, fields.prompt(), fields.param)
    count = len(prompts)
    adapters = _one_each("lora_path", _placed("lora_path", fields.lora_path), count)
    models = [front.access.find(call.key, name or None, place) for place, name in adapters]
    sent, choices = _samplings(front, fields)
    samplings = _one_each("sampling_params", sent, count)
    check_count(front, count, choices, fields.param, fields.choices_param)
    names = _names(call, fields, count)
    now, scope = time.monotonic(), call.key.scope_with(fields.cache_salt)
    requests = [
        Request(
            request_id=request_id_for(f"{names[index]}-{choice}" if choices > 1 else names[index]),
            prompt=prompts[index],
            sampling=seeded(samplings[index], choice),
            arrived_at=now,
            adapter_id=models[index].adapter_id,
            tenant=call.key.tenant,
            cache_scope=scope,
            priority=call.key.priority,
        )
        for index in range(count)
        for choice in range(choices)
    ]
    places = zip(params_of(fields.prompt(), fields.param), adapters, strict=True)
    sent_as = tuple(SentAs(prompt, model) for prompt, (model, _) in places)
    return ParsedCall(call, call.name, tuple(requests), choices, sent_as=sent_as, limit_param=fields.limit_param)


def _samplings(front: Front, fields: GenerateFields) -> tuple[list[SamplingParams], int]:
    """The sampling parameters as they were sent, and the number of answers per prompt."""
    logprobs = fields.logprobs(), fields.prompt_logprobs()
    samplings: list[SamplingParams] = []
    choices: set[int] = set()
    for place, one in _placed("sampling_params", fields.sampling_params or NativeSampling()):
        with _inside(place):
            choices.add(one.choices())
            samplings.append(one.sampling(*logprobs, front.tokenizer.eos_ids))
    if len(choices) > 1:
        raise RequestError.bad_field("sampling_params", "n must be the same for all prompts of a call.")
    return samplings, choices.pop()


@contextmanager
def _inside(place: str) -> Iterator[None]:
    """An error in an object's field names the object's place too."""
    try:
        yield
    except RequestError as error:
        raise RequestError.bad_field(f"{place}.{error.fault.param}", error.fault.message) from None


def _names(call: Call, fields: GenerateFields, count: int) -> list[str]:
    """The name of each prompt's request: the client's `rid`, or one made from the call's name."""
    if isinstance(fields.rid, list):
        different = len(set(fields.rid))
        if len(fields.rid) != count or different != count:
            held = f"{len(fields.rid)} names, {different} of them different"
            message = f"rid must hold {count} different names, one per prompt; it holds {held}."
            raise RequestError.bad_field("rid", message)
        return [checked_name(f"rid.{index}", name) for index, name in enumerate(fields.rid)]
    return [f"{call.name}-{index}" for index in range(count)] if fields.is_list else [call.name]


def _placed(param: str, given: Value | list[Value]) -> list[tuple[str, Value]]:
    """Each value that was sent, with its place in the body."""
    if isinstance(given, list):
        return [(f"{param}.{index}", one) for index, one in enumerate(given)]
    return [(param, given)]


def _one_each(param: str, given: Sequence[Value], count: int) -> Sequence[Value]:
    """A single value counts for every prompt."""
    if len(given) == 1:
        return list(given) * count
    if len(given) != count:
        raise RequestError.bad_field(param, f"There are {count} prompts but {len(given)} {param}; give one for each.")
    return given
