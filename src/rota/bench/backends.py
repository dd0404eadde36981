"""A backend knows how to write a request for one kind of server and how to read its stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from rota.bench.questions import Question

ENDINGS = ("stop", "length")  # any other finish reason is a failure


class UsageFields(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


# An event of a stream, below: only the needed fields are read, because there is one event per token. An event carries a
# token also where its text is empty: a character can take several tokens.


class _ChoiceFields(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class CompletionPiece(msgspec.Struct):
    """OpenAI's events: each carries the new text, and the last carries the usage."""

    choices: list[_ChoiceFields] = []
    usage: UsageFields | None = None
    error: Any = None

    def has_token_after(self, _before: UsageFields) -> bool:
        return bool(self.choices) and (self.choices[0].finish_reason is None or bool(self.choices[0].text))

    @property
    def ending(self) -> str | None:
        return self.choices[0].finish_reason if self.choices else None


class _ReasonFields(msgspec.Struct):
    type: str
    message: str = ""


class _MetaInfoFields(UsageFields):
    finish_reason: _ReasonFields | None = None


class GeneratedPiece(msgspec.Struct):
    """SGLang's events: each carries the whole text so far and its number of tokens."""

    meta_info: _MetaInfoFields | None = None
    error: Any = None

    def has_token_after(self, before: UsageFields) -> bool:
        return self.meta_info is not None and self.meta_info.completion_tokens > before.completion_tokens

    @property
    def ending(self) -> str | None:
        reason = self.meta_info and self.meta_info.finish_reason
        return reason.type if reason else None

    @property
    def usage(self) -> UsageFields | None:
        return self.meta_info


StreamEvent = CompletionPiece | GeneratedPiece


@dataclass(frozen=True, slots=True)
class Backend:
    """The paths of a server, and how to write questions and read answers."""

    path: str
    write: Callable[[Question, str | None, str], dict[str, Any]]  # the adapter's name or None, the base's name
    read: Callable[[bytes], StreamEvent]
    load_path: str
    unload_path: str
    knows_ignore_eos: bool = True

    def body(self, question: Question, adapter: str | None, base: str, is_ignoring_eos: bool) -> bytes:
        fields = self.write(question, adapter, base)
        if is_ignoring_eos and self.knows_ignore_eos:
            fields.get("sampling_params", fields)["ignore_eos"] = True
        return msgspec.json.encode(fields)


def _completion(question: Question, adapter: str | None, base: str) -> dict[str, Any]:
    prompt = question.prompt
    return {
        "model": adapter or base,
        "prompt": prompt if isinstance(prompt, str) else prompt.tolist(),
        "max_tokens": question.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _generate(question: Question, adapter: str | None, _base: str) -> dict[str, Any]:
    prompt = question.prompt
    return {
        **({"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt.tolist()}),
        "sampling_params": {"max_new_tokens": question.output_tokens, "temperature": 0.0},
        "lora_path": adapter,
        "stream": True,
    }


_COMPLETIONS = Backend(
    "/v1/completions",
    _completion,
    msgspec.json.Decoder(CompletionPiece).decode,
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
_SGLANG = Backend(
    "/generate",
    _generate,
    msgspec.json.Decoder(GeneratedPiece).decode,
    "/load_lora_adapter",
    "/unload_lora_adapter",
)

BACKENDS = {
    "rota": _COMPLETIONS,
    "vllm": _COMPLETIONS,
    "openai": replace(_COMPLETIONS, knows_ignore_eos=False),
    "sglang": _SGLANG,
}
