"""The keywords of JSON Schema: where schemas stand in a schema, and which keywords no grammar can keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rota.core.errors import RequestError

BY_NAME = ("properties", "patternProperties")
IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
ALONE = ("items", "additionalItems", "additionalProperties")

# With what else can be said. The grammar library refuses these too, but without a place.
REFUSED = {
    "not": "say what is allowed instead",
    "if": "use anyOf with one schema for each case",
    "then": "use anyOf with one schema for each case",
    "else": "use anyOf with one schema for each case",
    "contains": "describe every item with items or prefixItems",
    "minContains": "describe every item with items or prefixItems",
    "maxContains": "describe every item with items or prefixItems",
    "uniqueItems": "leave it out, and drop repeated items from the answer",
    "dependentRequired": "use anyOf with one schema for each case",
    "dependentSchemas": "use anyOf with one schema for each case",
    "dependencies": "use anyOf with one schema for each case",
    "propertyNames": "use patternProperties with additionalProperties false",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "$dynamicRef": "use $ref",
    "$dynamicAnchor": "use $defs",
    "$recursiveRef": "use $ref",
    "x-guidance": "leave it out",
}
# Values of those keywords that ask for nothing.
_NOTHING: tuple[Any, ...] = (None, False, {})
_ANY_NAME = {"type": "string"}  # names are texts; zod says so of every record

KEPT_FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
REFUSED_FORMATS = frozenset(
    (
        "idn-email",
        "idn-hostname",
        "uri-reference",
        "iri",
        "iri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "regex",
    )
)

Place = tuple[str, ...]


def children(schema: dict[str, Any]) -> Iterator[tuple[Place, Any]]:
    """The schemas that stand directly in a schema, with their places. Wrong values are left to the library."""
    for name in BY_NAME:
        if isinstance(inner := schema.get(name), dict):
            yield from (((name, key), value) for key, value in inner.items())
    for name in IN_LISTS:
        if isinstance(inner := schema.get(name), list):
            yield from (((name, str(index)), value) for index, value in enumerate(inner))
    for name in ALONE:
        if isinstance(inner := schema.get(name), dict):
            yield (name,), inner


def drop_what_asks_for_nothing(schema: dict[str, Any]) -> None:
    """Take out refused keywords with empty values, and formats that are not the standard's: those are notes."""
    for name in REFUSED.keys() & schema.keys():
        if schema[name] in _NOTHING and not (name == "not" and schema[name] == {}):
            del schema[name]
    if schema.get("propertyNames") in (True, _ANY_NAME):
        del schema["propertyNames"]
    if isinstance(format := schema.get("format"), str) and format not in KEPT_FORMATS | REFUSED_FORMATS:
        del schema["format"]


def pointer(place: Place) -> str:
    """A place as a JSON pointer."""
    return "".join(f"/{step.replace('~', '~0').replace('/', '~1')}" for step in place)


def refusal(param: str, place: Place, sentence: str) -> RequestError:
    """The error for a place in a schema."""
    where = f"{param}, at {pointer(place)}" if place else param
    return RequestError.bad_field(param, f"{where}: {sentence}")
