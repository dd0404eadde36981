"""Routes as the application has them: paths, what they do, whose key they take, and the fields of their bodies."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from inspect import cleandoc
from typing import Any, cast

from pydantic import TypeAdapter

from docs.generate.tables import code, listed
from rota.dashboard.routes import routes_of
from rota.server.app import ROUTES, routes_of_dialects
from rota.server.route import HttpRoute


@cache
def all_routes() -> dict[str, HttpRoute]:
    """Every route by its path; those that put or delete have that before it."""
    routes = [*ROUTES, *routes_of_dialects(), *routes_of(cast(Any, None))]
    return {one.path if one.method in ("GET", "POST") else one.names[0]: one for one in routes}


def routes(*patterns: str) -> str:
    """A section for each route whose path fits one of the patterns."""
    known = all_routes()
    chosen = {path: known[path] for pattern in patterns for path in known if fnmatch(path, pattern)}
    return "\n\n".join(map(_section, chosen.values()))


def _section(route: HttpRoute) -> str:
    names = [_shown(name) for name in route.names if not name.startswith("HEAD ")]
    also = f" Also {', '.join(map(code, names[1:]))}." if names[1:] else ""
    sentence = cleandoc(route.handler.__doc__ or "")
    lines = [f"#### {code(names[0])}", "", sentence + also, "", f"- Key: {route.right.value}."]
    if route.takes:
        schema = route.takes.model_json_schema()
        lines += _fields("Body", schema, schema.get("$defs", {}))
    if route.gives:
        lines.append(f"- Answer: {listed(_object_in(TypeAdapter(route.gives).json_schema())['properties'])}.")
    return "\n".join(lines)


def _object_in(schema: dict[str, Any]) -> dict[str, Any]:
    """What an answer is, or is a list of."""
    if "properties" in schema:
        return schema
    definitions: dict[str, Any] = schema.pop("$defs")
    return cast(dict[str, Any], definitions[next(_references(schema))])


def _shown(path: str) -> str:
    return path.replace(":path}", "}")


def _fields(title: str, schema: dict[str, Any], objects: dict[str, Any], path: str = "") -> Iterator[str]:
    """The names of an object's fields, those that are required first, and then those of the objects in it."""
    fields = schema["properties"]
    required = [f"**{code(name)}**" for name in schema.get("required", ())]
    refused = [name for name, field in fields.items() if "Not supported" in field.get("description", "")]
    others = [code(name) for name in fields if name not in (*schema.get("required", ()), *refused)]
    note = f"; known, and refused unless empty: {listed(refused)}" if refused else ""
    yield f"- {title}: {', '.join(required + others)}{note}."
    for name, field in fields.items():
        for reference in dict.fromkeys(_references(field)):
            yield from _fields(code(path + name), objects[reference], objects, f"{path}{name}.")


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        for child in node.values():
            yield from _references(child)
    elif isinstance(node, list):
        for child in node:
            yield from _references(child)
