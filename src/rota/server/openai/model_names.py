"""A call of OpenAI's routes names its model in one field, or an adapter in another."""

from __future__ import annotations

from rota.core.errors import RequestError
from rota.server.call_options import CallOptions
from rota.server.front import Front
from rota.server.open_answers import Call
from rota.server.openai.sampling_fields import ModelNames
from rota.server.traffic.route import Chosen


def model_for(front: Front, call: Call, names: ModelNames, asks: CallOptions) -> Chosen:
    """The model or adapter of a call. Raises RequestError if two are named, or one that the key may not use."""
    if names.lora_path and front.registry.get(names.model) is not front.registry.base:
        adapter = front.access.find(call.key, names.lora_path, names.param)
        if front.access.find(call.key, names.model) is not adapter:
            message = f"model and lora_path name two different adapters, '{names.model}' and '{names.lora_path}'."
            raise RequestError.bad_field("lora_path", message)
    return front.choose(call.key, names.lora_path or names.model, names.param, asks.asker)
