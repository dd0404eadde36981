"""The fields of a request's body are checked, and a field that is refused comes with the nearest thing that works."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from rota.core.errors import Fault, FaultCode, RequestError

# ── advice ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# For every field that Rota knows and does not support: the nearest thing that works.

_LOGIT_BIAS = "logit_bias, allowed_token_ids and bad_words change which tokens may come"
_TEXT_ONLY = "Rota reads and writes text alone"
_OTHER_SERVERS = "Rota has its own way to spread requests over engines, so leave it out"
_BLANKS = "blanks in JSON are bounded, so leave it out"
_SAMPLES = "n gives several sampled answers, and temperature 0 the likeliest tokens"

ADVICE = {
    "added_tokens_config": "an adapter uses the tokens of the base model",
    "annotations": "leave it out: it says nothing to the model",
    "audio": _TEXT_ONLY,
    "audio_data": _TEXT_ONLY,
    "background": "keep the connection open, or let a job of your own wait for the answer",
    "best_of": _SAMPLES,
    "bootstrap_host": _OTHER_SERVERS,
    "bootstrap_port": _OTHER_SERVERS,
    "bootstrap_room": _OTHER_SERVERS,
    "caller": "leave it out: a call is the model's own",
    "chat_template": "put a chat_template.jinja into the model's folder, or render the prompt for /v1/completions",
    "citations": "write the sources into the text",
    "container": "Rota runs no code",
    "context": "send the whole conversation as messages",
    "context_management": "leave out old messages yourself; a conversation must fit the context",
    "custom_labels": "the key and X-Request-Id tell whose request it is in metrics and logs",
    "custom_logit_processor": _LOGIT_BIAS,
    "custom_params": _LOGIT_BIAS,
    "data_parallel_rank": _OTHER_SERVERS,
    "detokenize": "return_token_ids gives the tokens beside the text",
    "dimensions": "a vector of this model means something only as a whole",
    "disable_additional_properties": "write additionalProperties false into the schema",
    "disable_any_whitespace": _BLANKS,
    "documents": "write the documents into a message",
    "early_stopping": _SAMPLES,
    "echo": "add the last message to the answer, or send the rendered prompt to /v1/completions with echo",
    "encrypted_content": "send thoughts in clear, as content",
    "extra_key": "cache_salt keeps the KV of requests apart",
    "guided_whitespace_pattern": _BLANKS,
    "image_data": _TEXT_ONLY,
    "images": _TEXT_ONLY,
    "include_obfuscation": "leave it out: events have no padding",
    "inference_geo": "leave it out: the answer is made where the server runs",
    "input_embeds": "send text, or token ids as input_ids",
    "is_3d_lora_weight": "factors must be matrices, as PEFT saves them",
    "kv_transfer_params": _OTHER_SERVERS,
    "length_penalty": _SAMPLES,
    "load_inplace": "unload the adapter first, then load it",
    "logits_processors": _LOGIT_BIAS,
    "lora_id": "lora_path names an adapter",
    "max_tokens_per_doc": "truncate_prompt_tokens keeps the last tokens of every text",
    "mcp_servers": "let a program of your own call them, and describe them as tools",
    "max_dynamic_patch": _TEXT_ONLY,
    "media_io_kwargs": _TEXT_ONLY,
    "min_dynamic_patch": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "modalities": _TEXT_ONLY,
    "moderation": "leave it out: no answer is judged",
    "namespace": "leave it out: tools have one name",
    "prediction": "leave it out: the answer is the same without it",
    "prompt_embeds": "send the prompt as text or as token ids",
    "raw": "/v1/completions takes raw prompts",
    "repetition_detection": "repetition_penalty and frequency_penalty keep an answer from repeating itself",
    "return_cached_tokens_details": "usage.prompt_tokens_details has the cached tokens",
    "return_entropy": "return_logprob gives log-probabilities",
    "return_hidden_states": "/v1/embeddings gives the last hidden state of a text",
    "return_routed_experts": "leave it out",
    "routed_dp_rank": _OTHER_SERVERS,
    "session_params": "send the whole conversation again; the KV of its beginning is found in the cache",
    "stop_regex": "stop takes fixed texts, and regex describes a whole answer",
    "store": "keep the answers yourself: Rota stores none",
    "stream_reasoning": "include_reasoning false leaves the thoughts out",
    "stream_interval": "leave it out: every token is sent at once",
    "suffix": "write what follows into the prompt, as the model was trained to read it",
    "template": "put a chat_template.jinja into the model's folder",
    "thinking_token_budget": "max_tokens limits thoughts and answer together, and some templates know reasoning_effort",
    "token_ids_logprob": "top_logprobs_num gives the likeliest tokens",
    "tools": "/v1/chat/completions takes tools",
    "use_audio_in_video": _TEXT_ONLY,
    "use_beam_search": _SAMPLES,
    "verbosity": "ask for a short or long answer in a message",
    "video_data": _TEXT_ONLY,
    "vllm_xargs": _LOGIT_BIAS,
    "web_search_options": "describe a search of your own as one of the tools",
    "whitespace_pattern": _BLANKS,
}


def advice_on(field: str) -> str:
    """What to do instead, as the second half of a sentence."""
    return ADVICE.get(field, "leave it out")


# ── fields ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# The fields of a request's body are checked: a wrong one is refused by name, and none is ignored.

# Numbers for the engine must fit its integers, and no client needs a larger one.
MAX_COUNT = 2**31 - 1
# Token ids, messages and all other values: two prompts of 131,072 token ids fit.
MAX_VALUES = 270_000

Count = Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)]
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
_ONLY_NOTHING = WithJsonSchema(
    {"enum": list(_NOTHING), "description": "Not supported: only values that ask for nothing are accepted."}
)
# For known fields without support: only values that ask for nothing pass `refuse_unsupported`.
Unsupported = Annotated[Any, _ONLY_NOTHING]
# vLLM's field: only requests with the same salt find each other's KV.
CacheSalt = Annotated[str, Field(min_length=1)]

Body = TypeVar("Body", bound=BaseModel)

_WANTED = {
    "stop": "must be a text or a list of texts",
    "content": "must be a text or a list of text parts",
    "input": "must be a text or a list",
}
# Pydantic's sentences begin with the kind of a value. Ours begin with the field's name.
_AS_SUBJECT = re.compile(r"^[A-Z][a-z]+ (?=should)| after validation")


class Fields(BaseModel):
    """A body, or an object in one. Null is the same as no field."""

    model_config = ConfigDict(extra="forbid", strict=True)

    def refuse_unsupported(self, where: str = "") -> None:
        """Raises RequestError for a value without support that would change the answer. `where` ends in a dot."""
        for name, harmless in _unsupported_fields(type(self)).items():
            value = getattr(self, name)
            if value in _NOTHING or value in harmless:
                continue
            allowed = f" other than {' or '.join(map(repr, harmless))}" if harmless else ""
            message = f"Rota does not support {where}{name}{allowed}; {advice_on(name)}."
            raise RequestError.bad_field(where + name, message)


@functools.cache
def _unsupported_fields(kind: type[BaseModel]) -> dict[str, tuple[Any, ...]]:
    """The fields without support, and the values that ask for nothing besides the empty ones."""
    found = {}
    for name, field in kind.model_fields.items():
        if any(one is _ONLY_NOTHING for one in field.metadata):
            taken: Any = field.json_schema_extra["enum"] if isinstance(field.json_schema_extra, dict) else _NOTHING
            found[name] = tuple(taken[len(_NOTHING) :])
    return found


def unless(*values: Any) -> Any:
    """An optional field without support, for which these values ask for nothing."""
    return Field(default=None, json_schema_extra={"enum": [*_NOTHING, *values]})


def within(low: float, high: float | None = None) -> Any:
    """An optional field with limits for /docs. The code that reads the field checks them, with a better sentence."""
    limits: dict[str, Any] = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    return Field(default=None, json_schema_extra=limits)


def read_body(kind: type[Body], raw: bytes) -> Body:
    """Parse a body. Raises RequestError with the name of the first wrong field."""
    # Each value becomes an object of up to a hundred bytes, while the event loop waits. Counting commas is fast.
    if raw.count(b",") > MAX_VALUES:
        message = f"The body holds more than {MAX_VALUES:,} values, counted by their commas; send fewer at a time."
        raise RequestError(Fault(FaultCode.BODY_TOO_LARGE, message))
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=True, include_input=False)
        raise _explain(kind, _furthest(problems)) from None


def _furthest(problems: Sequence[Any]) -> Any:
    """The first problem. If a field may have several types, the problem that lies deepest in the body."""
    found, *others = problems
    for other in others:
        if _path(other).startswith(f"{_path(found)}."):
            found = other
    return found


def _explain(kind: type[BaseModel], problem: Any) -> RequestError:
    path = _path(problem)
    match problem["type"]:
        case "json_invalid":
            return RequestError(Fault(FaultCode.BAD_FIELD, f"The body is not JSON: {problem['ctx']['error']}."))
        case "missing":
            return RequestError.bad_field(path, f"{path} is missing.")
        case "extra_forbidden":
            known = _known(kind, path) if len(problem["loc"]) == 1 else ""
            return RequestError.bad_field(path[:200], f"'{path[:200]}' is not a field{known}.")
    field = path.rpartition(".")[2]
    is_wrong_type = problem["type"].endswith("_type")
    wanted = _WANTED[field] if is_wrong_type and field in _WANTED else _AS_SUBJECT.sub("", problem["msg"])
    return RequestError.bad_field(path, f"{path or 'The body'} {wanted}.")


def _known(kind: type[BaseModel], name: str) -> str:
    """The field that the client may have meant, or else all fields that have support."""
    supported = [field for field in kind.model_fields if field not in _unsupported_fields(kind)]
    if close := difflib.get_close_matches(name[:100], supported, n=1, cutoff=0.8):
        return f"; the nearest is {close[0]}"
    return f"; the fields are {', '.join(supported)}"


def _path(problem: Any) -> str:
    """The path of the problem, without the steps that pydantic adds for each type of a field."""
    steps: list[int | str] = list(problem["loc"])
    # An unknown field has the client's own name, even if it looks like a type's name.
    own = [steps.pop()] if problem["type"] == "extra_forbidden" else []
    return ".".join(str(step) for step in [*(step for step in steps if not _is_kind(step)), *own])


def _is_kind(step: int | str) -> bool:
    """Whether a step is a type's name. Field names have small letters."""
    return isinstance(step, str) and (step == "str" or "[" in step or step[:1].isupper())
