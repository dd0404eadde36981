"""A body in another shape is translated into one of /v1/chat/completions, and errors are translated back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rota.core.errors import Fault, RequestError
from rota.server.calls.known_fields import UnknownFields
from rota.server.calls.prompts import CallPrompts, Texts
from rota.server.openai.chat_fields import ChatCall, read_chat


@dataclass(frozen=True, slots=True)
class Translation:
    """A chat's body, and the names that the client knows by the names of its fields there."""

    body: dict[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)

    def read(self, texts: Texts) -> ChatCall:
        """Read it as a chat's. Raises RequestError with the client's names."""
        try:
            # Encoded again: the body's checks are there, also of what one field means for another. Infinity stays what
            # it is, so that it is refused.
            inner = replace(texts, unknown=UnknownFields(texts.unknown.mode))
            call = read_chat(inner, json.dumps(self.body).encode())
        except RequestError as error:
            raise RequestError(self._with_client_names(error.fault)) from None
        (sampling,) = call.samplings
        if grammar := sampling.grammar:
            sampling = replace(sampling, grammar=replace(grammar, param=self.name_of(grammar.param)))
        prompts = CallPrompts(call.prompts.tokens, (self.name_of("messages"),))
        limit_param = call.limit_param and self.name_of(call.limit_param)
        ignored = dict.fromkeys([*texts.unknown.ignored, *map(self.name_of, call.ignored)])
        return replace(call, prompts=prompts, samplings=(sampling,), limit_param=limit_param, ignored=tuple(ignored))

    def name_of(self, param: str) -> str:
        """The client's name of a field, or of the field that it lies in."""
        head, rest = param, ""
        while head:
            if (name := self.names.get(head)) is not None:
                return (name + rest).lstrip(".")
            head, dot, last = head.rpartition(".")
            rest = f"{dot}{last}{rest}"
        return param

    def _with_client_names(self, fault: Fault) -> Fault:
        if fault.param is None:
            return fault
        name = self.name_of(fault.param)
        return replace(fault, param=name, message=fault.message.replace(fault.param, name))
