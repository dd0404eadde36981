"""The fields of a request's body: refused by name where they are wrong, and never ignored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from rota.core.errors import Fault, FaultCode, RequestError

# What crosses to the engine must fit its integers; nobody means a larger number.
MAX_COUNT = 2**31 - 1
# Token ids, messages, whatever: two prompts of 131,072 token ids fit.
MAX_VALUES = 270_000

Count = Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)]
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
# For fields that we know and cannot do: only values that say nothing pass `refuse_unless_nothing`.
Unsupported = Annotated[
    Any,
    WithJsonSchema({"enum": list(_NOTHING), "description": "Not supported: only values that say nothing are taken."}),
]

Body = TypeVar("Body", bound=BaseModel)

_WANTED = {
    "stop": "must be a text or a list of texts",
    "content": "must be a text or a list of text parts",
}
# Pydantic's sentences begin with the kind of a value, where ours have its name.
_AS_SUBJECT = re.compile(r"^[A-Z][a-z]+ (?=should)| after validation")


class Fields(BaseModel):
    """A body, or an object in one. Null is the same as leaving a field out."""

    model_config = ConfigDict(extra="forbid", strict=True)


def within(low: float, high: float | None = None) -> Any:
    """A field that may be left out, with limits for /docs; whoever reads it checks them, in a better sentence."""
    limits: dict[str, Any] = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    return Field(default=None, json_schema_extra=limits)


def read_body(kind: type[Body], raw: bytes) -> Body:
    """Parse a body; raises RequestError that names the first field that is wrong."""
    # Values become objects, of up to a hundred bytes each, while everybody waits. Commas are counted in no time.
    if raw.count(b",") > MAX_VALUES:
        message = f"The body holds more than {MAX_VALUES:,} values, counted by their commas; send fewer at a time."
        raise RequestError(Fault(FaultCode.BODY_TOO_LARGE, message))
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=True, include_input=False)
        raise _explain(kind, _furthest(problems)) from None


def refuse_unless_nothing(fields: BaseModel, meaningless: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """For each field by name: what it may say besides nothing at all, because that is what happens anyway."""
    for name, values in meaningless.items():
        value = getattr(fields, name)
        if value in _NOTHING or value in values:
            continue
        allowed = f" other than {' or '.join(map(repr, values))}" if values else ""
        raise RequestError.bad_field(where + name, f"{where}{name} is not supported{allowed}; leave it out.")


def _furthest(problems: Sequence[Any]) -> Any:
    """The first problem; where a field may be of several kinds, the one that got furthest into what was sent."""
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
            known = f"; the fields are {', '.join(kind.model_fields)}" if len(problem["loc"]) == 1 else ""
            return RequestError.bad_field(path[:200], f"'{path[:200]}' is not a field{known}.")
    field = path.rpartition(".")[2]
    is_wrong_type = problem["type"].endswith("_type")
    wanted = _WANTED[field] if is_wrong_type and field in _WANTED else _AS_SUBJECT.sub("", problem["msg"])
    return RequestError.bad_field(path, f"{path or 'The body'} {wanted}.")


def _path(problem: Any) -> str:
    """Where the problem is, without what pydantic adds for each kind that a field could have had."""
    steps: list[int | str] = list(problem["loc"])
    # A field that nobody knows is the client's own word, whatever it looks like.
    own = [steps.pop()] if problem["type"] == "extra_forbidden" else []
    return ".".join(str(step) for step in [*(step for step in steps if not _is_kind(step)), *own])


def _is_kind(step: int | str) -> bool:
    """Whether it is a type's name; fields have small letters."""
    return isinstance(step, str) and (step == "str" or "[" in step or step[:1].isupper())
