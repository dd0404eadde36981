"""What a program asks for is checked here, and put side by side: prompts, their parameters and their adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rota.core.errors import ConfigError, RequestError
from rota.core.request import Pooling, SamplingParams
from rota.text.chat import ChatMessage
from rota.text.vectors import Pairs, pairs_of

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Conversation = Sequence[ChatMessage]
Messages = Conversation | Sequence[Conversation]
Texts = str | Sequence[str]
Params = SamplingParams | Sequence[SamplingParams] | None
Adapters = str | Sequence[str | None] | None


@dataclass(frozen=True, slots=True)
class Asked:
    """A call before its adapters have ids: they get them when its requests are sent."""

    prompts: list[tuple[int, ...]]
    samplings: list[SamplingParams]
    adapters: list[str | None]
    is_continuation: bool = True
    n: int = 1
    pooling: Pooling | None = None


def check_paths(model: Any, adapters: Any) -> None:
    if not isinstance(model, str | Path | None):
        raise ConfigError(f"model must be a name or a folder, not {model!r}.")
    paths = {} if adapters is None else adapters
    if not isinstance(paths, Mapping) or not all(isinstance(one, str | Path) for one in [*paths, *paths.values()]):
        raise ConfigError(f"adapters must be a dict of names and folders, not {adapters!r}.")


def listed_prompts(prompts: Any) -> list[Prompt]:
    """One prompt, a text or tokens, is a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise _wrong("prompts", "a text, a list of tokens, or a list of these", prompts)
    found = list(prompts)
    return [found] if found and all(isinstance(one, int) for one in found) else found


def checked_tokens(prompt: Any, vocabulary: int) -> tuple[int, ...]:
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Sequence):
        raise _wrong("prompt", "a text or a list of tokens", prompt)
    for token in prompt:
        if not isinstance(token, int) or not 0 <= token < vocabulary:
            raise RequestError.bad_field(
                "prompt", f"A prompt holds {token!r}; token ids lie between 0 and {vocabulary - 1}."
            )
    return tuple(prompt)


def listed_conversations(messages: Any) -> list[Conversation]:
    """One conversation is a list of one."""
    form = 'a list of messages such as {"role": "user", "content": "Hello"}, or a list of such lists'
    if not isinstance(messages, list | tuple):
        raise _wrong("messages", form, messages)
    conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
    for conversation in conversations:
        if not isinstance(conversation, list | tuple) or not conversation:
            raise _wrong("messages", form, conversation)
        for message in conversation:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise _wrong("messages", form, message)
    return conversations


def paired(text_1: Any, text_2: Any) -> tuple[list[str], Pairs]:
    """All texts, and which of them go together."""
    first, second = ([one] if isinstance(one, str) else one for one in (text_1, text_2))
    for param, texts in (("text_1", first), ("text_2", second)):
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise _wrong(param, "a text or a list of texts", texts)
    return [*first, *second], pairs_of(len(first), len(second))


def each_params(params: Any, count: int) -> list[SamplingParams]:
    return _each("params", params or SamplingParams(), SamplingParams, "SamplingParams, or a list of them", count)


def each_adapter(adapter: Any, count: int) -> list[str | None]:
    return _each("adapter", adapter, str | None, "a name, None for the base model, or a list of these", count)


def _each(param: str, given: Any, kind: Any, form: str, count: int) -> list[Any]:
    """One for all prompts, or a list with one for each."""
    found = [given] * count if isinstance(given, kind) else given
    if not isinstance(found, list | tuple):
        raise _wrong(param, form, given)
    for one in found:
        if not isinstance(one, kind):
            raise _wrong(param, form, one)
    if len(found) != count:
        raise RequestError.bad_field(
            param, f"There are {count} prompts, but the list of {param} has {len(found)}; give one per prompt."
        )
    return list(found)


def _wrong(param: str, form: str, given: object) -> RequestError:
    return RequestError.bad_field(param, f"{param} must be {form}, not {str(given)[:80]!r} ({type(given).__name__}).")
