"""The arguments of a call are those that its function names: an object of a tool's schema takes no others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# An object with one of these says itself what else it takes, or shares its properties with another schema.
_OPEN = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties"}
    | {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas"}
)
_BY_NAME = ("properties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "prefixItems")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same schema without properties that it does not name. JSON Schema would take any, and models make them up."""
    return dict(schema) if _has_shared_parts(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name in _BY_NAME:
        if isinstance(inner := schema.get(name), dict):
            found[name] = {key: _closed(one) for key, one in inner.items()}
    for name in _LISTED:
        if isinstance(inner := schema.get(name), list):
            found[name] = [_closed(one) for one in inner]
    if isinstance(schema.get("items"), dict):
        found["items"] = _closed(schema["items"])
    if "properties" in schema and _OPEN.isdisjoint(schema):
        found["additionalProperties"] = False
    return found


def _has_shared_parts(value: Any) -> bool:
    """Whether parts of the schema hold together: then none of them knows all properties."""
    if isinstance(value, dict):
        return "allOf" in value or any(map(_has_shared_parts, value.values()))
    return isinstance(value, list) and any(map(_has_shared_parts, value))
