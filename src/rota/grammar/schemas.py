"""A client's JSON schema becomes one that the grammar library keeps in every part."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from rota.grammar.disjoint import are_disjoint
from rota.grammar.endless import endless_place
from rota.grammar.keywords import (
    REFUSED,
    REFUSED_FORMATS,
    Place,
    drop_what_asks_for_nothing,
    refusal,
)
from rota.grammar.references import Root, UnknownReferenceError

# Between two parts of JSON stands at most one space, or a line's end and an indentation. Without a bound a weak model
# may write blanks until its answer is cut.
_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n[ \t]{0,16})?"}
# The library spells a text that is forced again with every token.
MAX_LITERAL = 4096
_MAX_DEPTH = 100


def library_schema(schema: Mapping[str, Any] | bool, param: str) -> dict[str, Any]:
    """The schema with the library's options. Raises RequestError with the place of what the library cannot keep."""
    if schema is False:
        raise refusal(param, (), "no answer meets the schema false.")
    kept = {} if schema is True else copy.deepcopy(dict(schema))
    read = _Reader(kept, param)
    for place, one in read.root.reached():
        read.check(place, one)
    if (stuck := endless_place(read.root)) is not None:
        raise refusal(param, stuck, "it requires itself, so no answer would ever end.")
    return {**kept, "x-guidance": _OPTIONS}


class _Reader:
    """Checks the schemas of a root, one by one."""

    def __init__(self, schema: dict[str, Any], param: str) -> None:
        self.root = Root(schema)
        self._param = param

    def check(self, place: Place, schema: dict[str, Any]) -> None:
        """Change the schema where that is enough. Raises RequestError for what would not be kept."""
        self._check_place(place, schema)
        drop_what_asks_for_nothing(schema)
        _list_names(self.root, schema)
        if refused := next((name for name in REFUSED if name in schema), None):
            raise refusal(self._param, place, f"'{refused}' is not supported; {REFUSED[refused]}.")
        if isinstance(schema.get("format"), str) and schema["format"] in REFUSED_FORMATS:
            raise refusal(self._param, place, f"the format '{schema['format']}' is not supported; use pattern.")
        if any(len(text) > MAX_LITERAL for text in _literals(schema)):
            raise refusal(self._param, place, f"a text is longer than {MAX_LITERAL:,} characters.")
        self._check_count(place, schema)
        options = schema.get("oneOf")
        if "anyOf" not in schema and isinstance(options, list) and are_disjoint(self.root, options):
            schema["anyOf"] = schema.pop("oneOf")

    def _check_count(self, place: Place, schema: dict[str, Any]) -> None:
        """Names that the schema does not list may come twice in an answer, and then count once."""
        least, required = schema.get("minProperties"), schema.get("required")
        is_sure = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        listed = len(required) if isinstance(required, list) else 0
        if isinstance(least, int) and least > max(1, listed) and not is_sure:
            sentence = "'minProperties' above 1 is not supported with names that are not listed; list them in required."
            raise refusal(self._param, place, sentence)

    def _check_place(self, place: Place, schema: Any) -> None:
        if not isinstance(schema, dict):
            raise refusal(self._param, place, "a schema must be an object, true or false.")
        if len(place) > _MAX_DEPTH:
            raise refusal(self._param, place[:3], "the schema is nested too deeply; name its parts in $defs.")
        if "$ref" in schema:
            try:
                self.root.target(schema["$ref"])
            except UnknownReferenceError as error:
                raise refusal(self._param, (*place, "$ref"), str(error)) from None


def _list_names(root: Root, schema: dict[str, Any]) -> None:
    """An object whose names are among a few, as pydantic writes it, becomes one that lists them."""
    match root.resolved(schema.get("propertyNames")):
        case {"enum": [*names]} if all(isinstance(name, str) for name in names):
            pass
        case {"const": str(name)}:
            names = [name]
        case _:
            return
    if not schema.keys() & {"properties", "patternProperties"}:
        del schema["propertyNames"]
        schema["properties"] = dict.fromkeys(names, schema.get("additionalProperties", True))
        schema["additionalProperties"] = False


def _literals(schema: dict[str, Any]) -> Iterator[str]:
    """The texts that an answer may have to repeat, and the pattern."""
    if isinstance(properties := schema.get("properties"), dict):
        yield from properties
    constant, options, pattern = schema.get("const"), schema.get("enum"), schema.get("pattern")
    yield from (
        value
        for value in (constant, pattern, *(options if isinstance(options, list) else ()))
        if isinstance(value, str)
    )
