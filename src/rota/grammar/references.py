"""References within a JSON schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from rota.grammar.keywords import Place, children

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
