"""The fields of a request's body are checked: a wrong one is refused by name, and so are most that are unknown."""

from __future__ import annotations

import difflib
import functools
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from rota.core.errors import Fault, FaultCode, RequestError
from rota.server.calls.known_fields import NOTHING, UnknownFields, advice_on, ignorable

# Numbers for the engine must fit its integers, and no client needs a larger one.
MAX_COUNT = 2**31 - 1
# Token ids, messages and all other values: two prompts of 131,072 token ids fit.
MAX_VALUES = 270_000

Count = Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)]
_ONLYNOTHING = WithJsonSchema(
    {"enum": list(NOTHING), "description": "Not supported: only values that ask for nothing are accepted."}
)
# For known fields without support: only values that ask for nothing pass `refuse_unsupported`.
Unsupported = Annotated[Any, _ONLYNOTHING]
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
            if value in NOTHING or value in harmless:
                continue
            raise RequestError.bad_field(where + name, _unsupported(where + name, harmless))


def _unsupported(path: str, harmless: Sequence[Any]) -> str:
    allowed = f" other than {' or '.join(map(repr, harmless))}" if harmless else ""
    return f"Rota does not support {path}{allowed}; {advice_on(path.rpartition('.')[2])}."


@functools.cache
def _unsupported_fields(kind: type[BaseModel]) -> dict[str, tuple[Any, ...]]:
    """The fields without support, and the values that ask for nothing besides the empty ones."""
    found = {}
    for name, field in kind.model_fields.items():
        if any(one is _ONLYNOTHING for one in field.metadata):
            taken: Any = field.json_schema_extra["enum"] if isinstance(field.json_schema_extra, dict) else NOTHING
            found[name] = tuple(taken[len(NOTHING) :])
    return found


def unless(*values: Any) -> Any:
    """An optional field without support, for which these values ask for nothing."""
    return Field(default=None, json_schema_extra={"enum": [*NOTHING, *values]})


def within(low: float, high: float | None = None) -> Any:
    """An optional field with limits for /docs. The code that reads the field checks them, with a better sentence."""
    limits: dict[str, Any] = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    return Field(default=None, json_schema_extra=limits)


def read_body(kind: type[Body], raw: bytes, unknown: UnknownFields | None = None) -> Body:
    """Parse a body. Raises RequestError with the name of the first wrong field.

    `unknown` says which unknown fields are ignored; without it, none is.
    """
    raw = raw.removeprefix(BOM_UTF8)  # some programs write it before every text
    # Each value becomes an object of up to a hundred bytes, while the event loop waits. Counting commas is fast.
    if raw.count(b",") > MAX_VALUES:
        message = f"The body holds more than {MAX_VALUES:,} values, counted by their commas; send fewer at a time."
        raise RequestError(Fault(FaultCode.BODY_TOO_LARGE, message))
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=True, include_input=False)
        # Most bodies have no unknown field, and are read once.
        if unknown is None or not any(problem["type"] == "extra_forbidden" for problem in problems):
            raise _explain(kind, _furthest(problems)) from None
    return _read_with_unknown(kind, raw, unknown)


def _read_with_unknown(kind: type[Body], raw: bytes, unknown: UnknownFields) -> Body:
    try:
        body = kind.model_validate_json(raw, extra="allow")
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=True, include_input=False)
        raise _explain(kind, _furthest(problems)) from None
    for path, value in _unknown_in(body):
        if not unknown.takes(path, value):
            known = ignorable(path)
            if known is None or unknown.mode == "refuse":
                raise _unknown(kind, path)
            raise RequestError.bad_field(path, _unsupported(path, known.values or ()))
    return body


def _unknown_in(body: BaseModel, where: str = "") -> Iterator[tuple[str, Any]]:
    """The fields that no model has, each with its path. They are taken out of the body."""
    if (unknown := body.model_extra) and body.model_config.get("extra") == "forbid":
        yield from ((where + name, value) for name, value in unknown.items())
        unknown.clear()
    for name in type(body).model_fields:
        value = getattr(body, name)
        places = enumerate(value) if isinstance(value, list) else [("", value)]
        for index, one in places:
            if isinstance(one, BaseModel):
                yield from _unknown_in(one, f"{where}{name}.{index}.".replace("..", "."))


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
            return _unknown(kind, path)
    field = path.rpartition(".")[2]
    is_wrong_type = problem["type"].endswith("_type")
    wanted = _WANTED[field] if is_wrong_type and field in _WANTED else _AS_SUBJECT.sub("", problem["msg"])
    return RequestError.bad_field(path, f"{path or 'The body'} {wanted}.")


def _unknown(kind: type[BaseModel], path: str) -> RequestError:
    known = "" if "." in path else _known(kind, path)
    return RequestError.bad_field(path[:200], f"'{path[:200]}' is not a field{known}.")


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
