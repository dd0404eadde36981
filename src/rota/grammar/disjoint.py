"""Schemas are disjoint if no answer meets two of them: then `oneOf` says the same as `anyOf`, which grammars can keep.

The grammar library finds this out for itself where the schemas are simple. Unions with a tag, as pydantic writes them,
hold references, which it does not follow.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rota.grammar.references import Root

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
