"""A schema is endless if each answer that meets it must hold another one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rota.grammar.keywords import Place
from rota.grammar.references import Root

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
