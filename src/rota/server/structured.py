"""The fields that OpenAI's and SGLang's routes share for answers of a given form, and how such fields are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import WithJsonSchema
from pydantic_core import from_json

from rota.core.errors import RequestError
from rota.core.grammar import Grammar
from rota.core.request import SamplingParams
from rota.grammar import texts
from rota.grammar.texts import Tag
from rota.server.fields import Fields

# JSON, or a text that holds JSON. Read in `schema_in`, with better sentences than a union of types gives.
JsonOrText = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "string"}, {"type": "null"}]})
]
# Some clients send every field they know, with an empty text for nothing.
_NOTHING: tuple[Any, ...] = (None, "")
# By the field's name in the body: what kind of form it asks for, and its value.
Forms = dict[str, tuple[str, Any]]


class FormFields(Fields):
    """SGLang's names. At most one of the fields of a body may say what the answer looks like."""

    json_schema: JsonOrText = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: JsonOrText = None

    def asked_forms(self) -> Forms:
        """What the client sent about the answer's form."""
        return sent(self, ("json_schema", "regex", "ebnf", "structural_tag"))

    def grammar(self) -> Grammar | None:
        """What the answer must look like. Raises RequestError if it is not clear, or cannot be kept."""
        asked = self.asked_forms()
        if len(asked) > 1:
            first, second, *_ = asked
            raise RequestError.bad_field(second, f"{first} and {second} both say what the answer looks like; send one.")
        return next((form(kind, value, param) for param, (kind, value) in asked.items()), None)


def sent(fields: Fields, names: Sequence[str], where: str = "") -> Forms:
    """Fields that were sent with a value."""
    return {where + name: (name, value) for name in names if (value := getattr(fields, name)) not in _NOTHING}


def form(kind: str, value: Any, param: str) -> Grammar | None:
    """The grammar that a field asks for."""
    match kind:
        case "json_schema" | "guided_json":
            return texts.json_schema(schema_in(value, param), param)
        case "json_object":
            return texts.json_object(param) if value else None
        case "regex" | "guided_regex":
            return texts.regex(value, param)
        case "choice" | "guided_choice":
            return texts.choice(value, param)
        case "ebnf" | "grammar" | "guided_grammar":
            return texts.ebnf(value, param)
        case "structural_tag":
            return tags_in(value, param)
    raise AssertionError(f"no field asks for {kind}")


def guided(params: SamplingParams, grammar: Grammar | None, eos_ids: frozenset[int]) -> SamplingParams:
    """The parameters of an answer that follows a grammar. Only an end token ends one that is complete."""
    if grammar is None:
        return params
    return replace(params, grammar=grammar, ignore_eos=False, stop_token_ids=params.stop_token_ids | eos_ids)


def placed(params: SamplingParams, place: str) -> SamplingParams:
    """The same parameters, whose grammar was asked for in an object of the body."""
    if params.grammar is None:
        return params
    return replace(params, grammar=replace(params.grammar, param=f"{place}.{params.grammar.param}"))


def schema_in(value: Any, param: str) -> Mapping[str, Any] | bool:
    """A schema, or a text that holds one."""
    schema = _parsed(value, param)
    if not isinstance(schema, dict | bool):
        raise RequestError.bad_field(param, f"{param} must be a JSON schema: an object, true or false.")
    return schema


def tags_in(value: Any, param: str) -> Grammar:
    """Free text that turns into JSON of a schema where it spells a trigger."""
    match _parsed(value, param):
        case {"structures": [_, *_] as structures, "triggers": [str(_), *_] as triggers}:
            tags = [_tag(one, triggers, f"{param}.structures.{index}") for index, one in enumerate(structures)]
            return texts.tagged(tags, param)
        case {"format": _}:
            message = f"{param}.format is not supported; send {param}.structures and {param}.triggers."
            raise RequestError.bad_field(f"{param}.format", message)
    message = f"{param} must be an object with 'structures' and 'triggers', both lists that are not empty."
    raise RequestError.bad_field(param, message)


def _tag(structure: Any, triggers: Sequence[Any], where: str) -> Tag:
    match structure:
        case {"begin": str(begin), "end": str(end)} if structure.keys() <= {"begin", "end", "schema"}:
            schema = schema_in(structure.get("schema", True), f"{where}.schema")
        case _:
            raise RequestError.bad_field(where, f"{where} must be an object with 'begin', 'schema' and 'end'.")
    for trigger in triggers:
        if isinstance(trigger, str) and trigger and begin.startswith(trigger):
            return Tag(begin=begin, schema=schema, end=end, trigger=trigger)
    raise RequestError.bad_field(f"{where}.begin", f"{where}.begin starts with none of the triggers.")


def _parsed(value: Any, param: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return from_json(value)
    except ValueError as error:
        raise RequestError.bad_field(param, f"{param} is not JSON: {error}.") from None
