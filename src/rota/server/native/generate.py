"""POST /generate continues prompts, in SGLang's shape."""

from __future__ import annotations

import time
from dataclasses import replace

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.core.request import Request
from rota.runtime.seeds import seeded
from rota.server.answers.answer import ParsedCall, SentAs
from rota.server.answers.respond import respond
from rota.server.call import checked_name, keep_name
from rota.server.context import AppContext
from rota.server.docs import gives, takes
from rota.server.native.call import GenerateCall, GenerateFields, read_generate
from rota.server.native.writer import GenerateBody, GeneratedBody, GenerateWriter, LogprobFormat
from rota.server.open_answers import Call, name_of, request_id_for


def install_generate_route(app: FastAPI, context: AppContext) -> None:
    @app.post("/generate", openapi_extra=takes(GenerateFields), responses=gives(GenerateBody, GeneratedBody))
    async def generate(http: HttpRequest) -> Response:
        """Continue prompts, in SGLang's shape: one object, or a list of them for a list of prompts."""
        call = context.identify(http)
        named = await context.read(call.key, http, read_generate)
        if named.name is not None:
            call = replace(call, name=keep_name(http, checked_name("rid", named.name)))
        read = named.call
        parsed = _parsed(context, call, read)
        context.answers.check_free(call.key, set(map(name_of, parsed.requests)))
        is_list = read.is_list or parsed.choices_per_prompt > 1
        logprobs = None if read.logprobs is None else LogprobFormat(context.tokenizer.pieces, *read.logprobs)
        writer = GenerateWriter(parsed.requests, is_list, logprobs)
        return await respond(context, http, parsed, writer, read.is_streamed)


def _parsed(context: AppContext, call: Call, read: GenerateCall) -> ParsedCall:
    """One request per choice of each prompt."""
    asker = read.call_options.asker
    models = [context.choose(call.key, name or None, place, asker) for place, name in read.adapters]
    names = _names(call, read)
    now, scope = time.monotonic(), call.key.scope_with(read.call_options.cache_salt)
    priority = call.key.priority_for(read.call_options.priority)
    requests = [
        Request(
            request_id=request_id_for(f"{names[index]}-{choice}" if read.choices > 1 else names[index]),
            prompt=prompt,
            sampling=seeded(read.samplings[index], choice),
            arrived_at=now,
            adapter_id=models[index].adapter_id,
            tenant=call.key.tenant,
            cache_scope=scope,
            priority=priority,
            first_token_s=call.first_token_s,
        )
        for index, prompt in enumerate(read.prompts.tokens)
        for choice in range(read.choices)
    ]
    places = zip(read.prompts.params, read.adapters, strict=True)
    sent_as = tuple(SentAs(prompt, model) for prompt, (model, _) in places)
    return ParsedCall(
        call,
        call.name,
        tuple(requests),
        read.choices,
        sent_as=sent_as,
        limit_param=read.limit_param,
        text=read.call_options.text,
        chosen=tuple(models),
    )


def _names(call: Call, read: GenerateCall) -> list[str]:
    """The name of each prompt's request: the client's `rid`, or one made from the call's name."""
    if read.names is not None:
        return [checked_name(f"rid.{index}", name) for index, name in enumerate(read.names)]
    return [f"{call.name}-{index}" for index in range(len(read.prompts.tokens))] if read.is_list else [call.name]
