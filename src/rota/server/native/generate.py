"""POST /generate: prompts in, continuations out, in SGLang's shape."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.core.errors import RequestError
from rota.core.request import Request
from rota.server.answer import Ask, seeded
from rota.server.fields import read_body
from rota.server.front import Front
from rota.server.native.bodies import GenerateBody, GeneratedBody
from rota.server.native.fields import GenerateFields, NativeSampling
from rota.server.native.shape import GenerateShape, LogprobWords
from rota.server.open_answers import Call, checked_name, name_of, request_id_for
from rota.server.openapi import gives, takes
from rota.server.prompts import check_count, tokenized
from rota.server.respond import respond

Value = TypeVar("Value")


def install_generate_route(app: FastAPI, front: Front) -> None:
    @app.post("/generate", openapi_extra=takes(GenerateFields), responses=gives(GenerateBody, GeneratedBody))
    async def generate(http: HttpRequest) -> Response:
        """Continue prompts, in SGLang's shape: one object, or a list of them for a list of prompts."""
        call = front.greet(http)
        fields = read_body(GenerateFields, await http.body())
        fields.refuse_unsupported()
        if isinstance(fields.rid, str):
            call = Call(call.key, checked_name("rid", fields.rid))
        requests, choices = await _requests(front, call, fields)
        front.answers.check_free(call.key, set(map(name_of, requests)))
        shape = GenerateShape(requests, fields.is_list or choices > 1, _logprob_words(front, fields))
        return await respond(front, http, Ask(call, call.name, requests, choices), shape, bool(fields.stream))


def _logprob_words(front: Front, fields: GenerateFields) -> LogprobWords | None:
    if not fields.return_logprob:
        return None
    return LogprobWords(front.tokenizer.pieces, bool(fields.top_logprobs_num), bool(fields.return_text_in_logprobs))


async def _requests(front: Front, call: Call, fields: GenerateFields) -> tuple[tuple[Request, ...], int]:
    """A request for each choice of each prompt, and how many choices each prompt has."""
    prompts = await tokenized(front, fields.prompt(), fields.param)
    count = len(prompts)
    params = _one_each("sampling_params", fields.sampling_params or [NativeSampling()], count)
    adapters = fields.lora_path if isinstance(fields.lora_path, list) else [fields.lora_path]
    models = [front.access.find(call.key, name or None) for name in _one_each("lora_path", adapters, count)]
    choices = params[0].choices()
    if any(one.choices() != choices for one in params):
        raise RequestError.bad_field("sampling_params", "n must be the same for all prompts of a call.")
    check_count(prompts, choices, fields.param)
    logprobs, eos_ids = (fields.logprobs(), fields.prompt_logprobs()), front.tokenizer.eos_ids
    samplings = [one.sampling(*logprobs, eos_ids) for one in params]
    names = _names(call, fields, count)
    now = time.monotonic()
    requests = [
        Request(
            request_id_for(f"{names[index]}-{choice}" if choices > 1 else names[index]),
            prompts[index],
            seeded(samplings[index], choice),
            now,
            models[index].adapter_id,
            call.key.priority,
        )
        for index in range(count)
        for choice in range(choices)
    ]
    return tuple(requests), choices


def _names(call: Call, fields: GenerateFields, count: int) -> list[str]:
    """What each prompt's request is called: as the client says, else by the call's name."""
    if isinstance(fields.rid, list):
        if len(fields.rid) != count or len(set(fields.rid)) != count:
            message = f"rid must name each of {count} prompts, and no two alike; it holds {len(fields.rid)} names."
            raise RequestError.bad_field("rid", message)
        return [checked_name("rid", name) for name in fields.rid]
    return [f"{call.name}-{index}" for index in range(count)] if fields.is_list else [call.name]


def _one_each(param: str, given: Sequence[Value], count: int) -> Sequence[Value]:
    """What is said once counts for every prompt."""
    if len(given) == 1:
        return list(given) * count
    if len(given) != count:
        raise RequestError.bad_field(param, f"There are {count} prompts but {len(given)} {param}; give one for each.")
    return given
