"""Random JSON schemas, bounded so that most answers of a model that knows nothing come to an end."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

NAMES = st.sampled_from(["a", "b", "name", "x y", 'q"', "é"])
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(-99, 99), st.sampled_from([0.5, -2.25]), st.text(max_size=5)
)
FORMATS = st.sampled_from(["date", "date-time", "ipv4", "uuid"])
PATTERNS = st.sampled_from(["^[a-c]{1,4}$", "^[0-9]{2}-[0-9]{2}$", "^(ja|nein)$", r"^\w{1,3}\d?$"])


@st.composite
def integers(draw: st.DrawFn) -> Schema:
    low = draw(st.integers(-50, 50))
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + draw(st.integers(7, 500))}
    return schema | draw(st.sampled_from([{}, {"multipleOf": 7}, {"multipleOf": 2}]))


@st.composite
def texts(draw: st.DrawFn) -> Schema:
    shortest = draw(st.integers(0, 3))
    return {"type": "string", "minLength": shortest, "maxLength": shortest + draw(st.integers(0, 6))}


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    least = draw(st.integers(0, 2))
    return {"type": "array", "items": draw(inner), "minItems": least, "maxItems": least + draw(st.integers(0, 2))}


@st.composite
def tuples(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    first = draw(st.lists(inner, min_size=1, max_size=2))
    return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}


@st.composite
def named(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    """A schema with parts in $defs, one of which may hold itself."""
    leaf = draw(inner)
    node = {
        "type": "object",
        "properties": {"value": leaf, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


SIMPLE: st.SearchStrategy[Schema] = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["null", "boolean"]}]),
    integers(),
    texts(),
    st.builds(lambda value: {"const": value}, VALUES),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=4)),
    st.builds(lambda name: {"type": "string", "format": name}, FORMATS),
    st.builds(lambda pattern: {"type": "string", "pattern": pattern}, PATTERNS),
)


def _larger(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    unions = st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
    return st.one_of(objects(inner), objects(inner), arrays(inner), tuples(inner), unions)


NESTED: st.SearchStrategy[Schema] = st.recursive(SIMPLE, _larger, max_leaves=5)
SCHEMAS: st.SearchStrategy[Schema] = st.one_of(objects(NESTED), objects(NESTED), NESTED, named(SIMPLE))
