"""The body of /generate becomes a call: prompts, their adapters and their sampling parameters, one of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from rota.core.errors import Fault, RequestError
from rota.core.request import SamplingParams
from rota.server.call_options import CallOptions
from rota.server.fields import read_body
from rota.server.native.fields import GenerateFields, NativeSampling
from rota.server.prompts import Prompts, Texts
from rota.server.reading import AskedModels
from rota.server.structured import placed
from rota.text.stream import TextOptions
from rota.text.tokenizer import Tokenizer

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """What the route needs of a body. Prompts, adapters and samplings stand in the same order."""

    prompts: Prompts
    # The field and the name of each prompt's adapter. No name: the base model.
    adapters: Sequence[tuple[str, str | None]]
    samplings: Sequence[SamplingParams]
    choices: int
    names: list[str] | None
    is_list: bool
    is_streamed: bool
    # None: no log-probabilities. Otherwise: with alternatives, and with texts.
    logprobs: tuple[bool, bool] | None
    asks: CallOptions
    limit_param: str  # the client's field that limits the output


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A call, or why it is refused. The client's name of the call is known in both cases."""

    name: str | None
    outcome: GenerateCall | Fault

    @property
    def call(self) -> GenerateCall:
        if isinstance(self.outcome, Fault):
            raise RequestError(self.outcome)
        return self.outcome

    @property
    def asked_models(self) -> AskedModels:
        """None of a call that is refused."""
        return () if isinstance(self.outcome, Fault) else tuple(self.outcome.adapters)


def read_generate(texts: Texts, raw: bytes) -> NamedCall:
    """Read a body. Raises RequestError if its fields cannot be read at all."""
    fields = read_body(GenerateFields, raw)
    fields.refuse_unsupported()
    name = fields.rid if isinstance(fields.rid, str) else None
    try:
        return NamedCall(name, _call_of(texts, fields))
    except RequestError as error:
        return NamedCall(name, error.fault)


def _call_of(texts: Texts, fields: GenerateFields) -> GenerateCall:
    prompts = texts.tokenized(fields.prompt(), fields.param)
    count = len(prompts.tokens)
    adapters = _one_each("lora_path", _placed("lora_path", fields.lora_path), count)
    sent, choices = _samplings(fields, texts.tokenizer)
    samplings = _one_each("sampling_params", sent, count)
    texts.check_count(count, choices, fields.param, fields.choices_param)
    return GenerateCall(
        prompts=prompts,
        adapters=adapters,
        samplings=samplings,
        choices=choices,
        names=_different(fields.rid, count) if isinstance(fields.rid, list) else None,
        is_list=fields.is_list,
        is_streamed=bool(fields.stream),
        logprobs=(bool(fields.top_logprobs_num), bool(fields.return_text_in_logprobs))
        if fields.return_logprob
        else None,
        asks=CallOptions(
            text=_text_options(fields),
            cache_salt=fields.cache_salt,
            asker=fields.conversation_id or fields.cache_salt,
            priority=fields.priority,
        ),
        limit_param=fields.limit_param,
    )


def _samplings(fields: GenerateFields, tokenizer: Tokenizer) -> tuple[list[SamplingParams], int]:
    """The sampling parameters as they were sent, and the number of answers per prompt."""
    logprobs = fields.logprobs(), fields.prompt_logprobs()
    samplings: list[SamplingParams] = []
    choices: set[int] = set()
    for place, one in _placed("sampling_params", fields.sampling_params or NativeSampling()):
        with _inside(place):
            choices.add(one.choices())
            samplings.append(placed(one.sampling(*logprobs, tokenizer), place))
    if len(choices) > 1:
        raise RequestError.bad_field("sampling_params", "n must be the same for all prompts of a call.")
    return samplings, choices.pop()


def _text_options(fields: GenerateFields) -> TextOptions:
    """Which parts of the answers are text. A call has one stream of text, so its prompts must agree."""
    given = fields.sampling_params or NativeSampling()
    first, *others = [one.text_options() for one in (given if isinstance(given, list) else [given])]
    if any(other != first for other in others):
        message = "skip_special_tokens and no_stop_trim must be the same for all prompts of a call."
        raise RequestError.bad_field("sampling_params", message)
    return first


@contextmanager
def _inside(place: str) -> Iterator[None]:
    """An error in an object's field names the object's place too."""
    try:
        yield
    except RequestError as error:
        raise RequestError.bad_field(f"{place}.{error.fault.param}", error.fault.message) from None


def _different(names: list[str], count: int) -> list[str]:
    different = len(set(names))
    if len(names) != count or different != count:
        held = f"{len(names)} names, {different} of them different"
        message = f"rid must hold {count} different names, one per prompt; it holds {held}."
        raise RequestError.bad_field("rid", message)
    return names


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
