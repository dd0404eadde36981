"""A call of OpenAI's routes names its model in one field, or an adapter in another."""

from __future__ import annotations

from rota.core.adapter import Adapter
from rota.core.errors import RequestError
from rota.server.front import Front
from rota.server.open_answers import Call
from rota.server.openai.sampling_fields import ModelNames


def model_for(front: Front, call: Call, names: ModelNames) -> Adapter:
    """The model or adapter of a call. Raises RequestError if two are named, or one that the key may not use."""
    adapter = front.access.find(call.key, names.lora_path or names.model, names.param)
    if not names.lora_path or front.registry.get(names.model) is front.registry.base:
        return adapter
    if front.access.find(call.key, names.model) is not adapter:
        message = f"model and lora_path name two different adapters, '{names.model}' and '{names.lora_path}'."
        raise RequestError.bad_field("lora_path", message)
    return adapter
