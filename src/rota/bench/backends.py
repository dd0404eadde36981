"""A backend is how one kind of server is asked, and what the pieces of its streams mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from rota.bench.workload import Question

ENDINGS = ("stop", "length")  # any other reason to end means that something went wrong


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Piece(Protocol):
    """One event of a stream. Only what is needed is read: this happens for every token."""

    def is_news_after(self, before: Usage) -> bool:
        """Whether it carries a token; text may be empty, since a character can take several tokens."""
        ...

    @property
    def ending(self) -> str | None: ...

    @property
    def usage(self) -> Usage | None: ...

    @property
    def error(self) -> Any: ...


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class CompletionPiece(msgspec.Struct):
    """OpenAI's: every event carries what is new, the last one the usage."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None

    def is_news_after(self, _before: Usage) -> bool:
        return bool(self.choices) and (self.choices[0].finish_reason is None or bool(self.choices[0].text))

    @property
    def ending(self) -> str | None:
        return self.choices[0].finish_reason if self.choices else None


class _Reason(msgspec.Struct):
    type: str
    message: str = ""


class _MetaInfo(Usage):
    finish_reason: _Reason | None = None


class GeneratedPiece(msgspec.Struct):
    """SGLang's: every event carries all there is so far, and how many tokens that is."""

    meta_info: _MetaInfo | None = None
    error: Any = None

    def is_news_after(self, before: Usage) -> bool:
        return self.meta_info is not None and self.meta_info.completion_tokens > before.completion_tokens

    @property
    def ending(self) -> str | None:
        reason = self.meta_info and self.meta_info.finish_reason
        return reason.type if reason else None

    @property
    def usage(self) -> Usage | None:
        return self.meta_info


@dataclass(frozen=True, slots=True)
class Backend:
    """Where questions go, how they are written and how answers are read."""

    path: str
    write: Callable[[Question, str | None, str], dict[str, Any]]  # the adapter's name or None, the base's name
    read: Callable[[bytes], Piece]
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


_V1 = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_COMPLETIONS = Backend("/v1/completions", _completion, msgspec.json.Decoder(CompletionPiece).decode, *_V1)
_OPENAI = Backend("/v1/completions", _completion, msgspec.json.Decoder(CompletionPiece).decode, *_V1, False)
_SGLANG = Backend(
    "/generate",
    _generate,
    msgspec.json.Decoder(GeneratedPiece).decode,
    "/load_lora_adapter",
    "/unload_lora_adapter",
)

BACKENDS = {"rota": _COMPLETIONS, "vllm": _COMPLETIONS, "openai": _OPENAI, "sglang": _SGLANG}
