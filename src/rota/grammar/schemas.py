"""A client's JSON schema becomes one that the grammar library keeps in every part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rota.core.errors import RequestError

# Between two parts of JSON stands at most one space, or a line's end and an indentation. Without a bound a weak model
# may write blanks until its answer is cut.
_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n[ \t]{0,16})?"}


def library_schema(schema: Mapping[str, Any] | bool, param: str) -> dict[str, Any]:
    """The schema with the library's options. Raises RequestError with the place of what the library cannot keep."""
    if schema is False:
        raise RequestError.bad_field(param, f"{param} is false, which no answer meets.")
    return {**({} if schema is True else schema), "x-guidance": _OPTIONS}
