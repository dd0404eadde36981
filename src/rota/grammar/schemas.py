"""A client's JSON schema becomes one that the grammar library keeps in every part."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from rota.core.errors import RequestError

# ── keywords ────────────────────────────────────────────────────────────────────────────────────────────────────────
# The keywords of JSON Schema: where schemas stand in a schema, and which keywords no grammar can keep.

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


# ── references ──────────────────────────────────────────────────────────────────────────────────────────────────────
# References within a JSON schema.

_ANCHOR = re.compile(r"#[A-Za-z_][-A-Za-z0-9._]*")


class UnknownReferenceError(ValueError):
    """A reference leads out of the schema, or to nothing."""


class Root:
    """A whole schema, in which references are found."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema

    def reached(self) -> Iterator[tuple[Place, Any]]:
        """Every schema that counts, once, from the root along references. It may be changed before the next comes."""
        waiting: list[tuple[Place, Any]] = [((), self.schema)]
        seen: set[int] = set()
        while waiting:
            place, schema = waiting.pop()
            if isinstance(schema, bool) or id(schema) in seen:
                continue
            seen.add(id(schema))
            yield place, schema
            waiting += [((*place, *steps), inner) for steps, inner in reversed(list(children(schema)))]
            if "$ref" in schema:
                waiting.append(self.target(schema["$ref"]))

    def target(self, reference: Any) -> tuple[Place, Any]:
        """The place and the schema that a reference names. Raises UnknownReferenceError."""
        if not isinstance(reference, str):
            raise UnknownReferenceError("a reference must be a text.")
        if not reference.startswith("#"):
            message = f"'{reference[:100]}' leads out of the schema, and nothing is fetched; put it into $defs."
            raise UnknownReferenceError(message)
        if _ANCHOR.fullmatch(reference):
            raise UnknownReferenceError(
                f"'{reference[:100]}' is an anchor; write the path, for example '#/$defs/NAME'."
            )
        place = tuple(_step(step) for step in reference.removeprefix("#").split("/")[1:])
        return place, self._at(place, reference)

    def _at(self, place: Place, reference: str) -> Any:
        found: Any = self.schema
        for step in place:
            match found:
                case dict() if step in found:
                    found = found[step]
                case list() if step.isdecimal() and int(step) < len(found):
                    found = found[int(step)]
                case _:
                    raise UnknownReferenceError(f"'{reference[:100]}' names nothing in the schema.")
        return found

    def resolved(self, schema: Any) -> Any:
        """The schema, or what it names if it is nothing but a reference."""
        seen: set[int] = set()
        while isinstance(schema, dict) and "$ref" in schema and id(schema) not in seen:
            seen.add(id(schema))
            try:
                schema = self.target(schema["$ref"])[1]
            except UnknownReferenceError:
                return {}
        return schema


def _step(step: str) -> str:
    return unquote(step).replace("~1", "/").replace("~0", "~")


# ── disjoint ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Schemas are disjoint if no answer meets two of them: then `oneOf` says the same as `anyOf`, which grammars can keep.
#
# The grammar library finds this out for itself where the schemas are simple. Unions with a tag, as pydantic writes
# them, hold references, which it does not follow.

# Every pair is compared.
_MAX_OPTIONS = 64


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is certain of all answers that meet a schema. None: nothing."""

    types: set[str] | None
    values: set[str] | None
    # By name, the values of properties that every answer has.
    properties: dict[str, set[str]]

    def exclude(self, other: _Facts) -> bool:
        shared = self.properties.keys() & other.properties.keys()
        return (
            _are_apart(self.types, other.types)
            or _are_apart(self.values, other.values)
            or any(_are_apart(self.properties[name], other.properties[name]) for name in shared)
        )


def are_disjoint(root: Root, options: Sequence[Any]) -> bool:
    """Whether it is certain that no answer meets two of the options."""
    schemas = [root.resolved(option) for option in options]
    if len(schemas) > _MAX_OPTIONS or not all(isinstance(schema, dict) for schema in schemas):
        return False
    facts = [_facts(root, schema) for schema in schemas]
    return all(first.exclude(second) for first, second in combinations(facts, 2))


def _facts(root: Root, schema: dict[str, Any]) -> _Facts:
    found = {name: _values(_property(root, schema, name)) for name in _required(schema)}
    known = {name: values for name, values in found.items() if values is not None}
    return _Facts(_types(schema), _values(schema), known)


def _are_apart(first: set[str] | None, second: set[str] | None) -> bool:
    """None: not known."""
    return first is not None and second is not None and not first & second


def _types(schema: dict[str, Any]) -> set[str] | None:
    """The types that an answer may have. A whole number is a number too."""
    match schema.get("type"):
        case str(name):
            names = {name}
        case [*names] if all(isinstance(name, str) for name in names):
            names = set(names)
        case _:
            return None
    return names | {"integer"} if "number" in names else names


def _values(schema: Any) -> set[str] | None:
    """The only values that an answer may have, each as a text that equal values share."""
    match schema:
        case {"const": value}:
            return {_text(value)}
        case {"enum": [*values]}:
            return {_text(value) for value in values}
    return None


def _text(value: Any) -> str:
    # 1 and 1.0 are the same number in JSON; true is not a number.
    number = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if number else value, sort_keys=True)


def _required(schema: dict[str, Any]) -> set[str]:
    """Names that every answer has, if the schema takes objects alone."""
    required = schema.get("required")
    if schema.get("type") != "object" or not isinstance(required, list):
        return set()
    return {name for name in required if isinstance(name, str)}


def _property(root: Root, schema: dict[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return root.resolved(properties.get(name)) if isinstance(properties, dict) else None


# ── endless ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# A schema is endless if each answer that meets it must hold another one.

# Each pass finds all schemas that end if those found so far do. Schemas written by people need two or three.
_PASSES = 32


def endless_place(root: Root) -> Place | None:
    """The place of a reference that no answer gets out of; None if some answer ends."""
    found = {id(schema): (place, schema) for place, schema in root.reached()}
    ending: set[int] = set()
    for _ in range(_PASSES):
        new = {key for key, (_, schema) in reversed(found.items()) if key not in ending and _ends(root, schema, ending)}
        if not new:
            break
        ending |= new
        if id(root.schema) in ending:
            return None
    else:
        return None  # it is too deep to say; an answer that does not end is cut by its length
    stuck = [place for key, (place, schema) in found.items() if key not in ending and "$ref" in schema]
    return stuck[0] if stuck else ()


def _ends(root: Root, schema: dict[str, Any], ending: set[int]) -> bool:
    """Whether some answer ends, if all schemas in `ending` have one that does."""

    def ends(inner: Any) -> bool:
        return not isinstance(inner, dict) or id(inner) in ending

    if "const" in schema or "enum" in schema:
        return True
    if "$ref" in schema and not ends(root.target(schema["$ref"])[1]):
        return False
    if not all(map(ends, _listed(schema, "allOf"))):
        return False
    if any(options and not any(map(ends, options)) for options in (_listed(schema, "anyOf"), _listed(schema, "oneOf"))):
        return False
    return all(map(ends, _demanded(schema)))


def _demanded(schema: dict[str, Any]) -> Iterator[Any]:
    """The parts that every answer has."""
    if schema.get("type") in ("object", ["object"]):
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict) and isinstance(required, list):
            yield from (properties.get(name) for name in required if isinstance(name, str))
    if schema.get("type") in ("array", ["array"]) and isinstance(least := schema.get("minItems"), int) and least > 0:
        first = _listed(schema, "prefixItems") or _listed(schema, "items")
        yield from first[:least]
        if len(first) < least:
            yield schema.get("items")


def _listed(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


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
    read = _SchemaChecker(kept, param)
    for place, one in read.root.reached():
        read.check(place, one)
    if (stuck := endless_place(read.root)) is not None:
        raise refusal(param, stuck, "it requires itself, so no answer would ever end.")
    return {**kept, "x-guidance": _OPTIONS}


class _SchemaChecker:
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
