"""The fields that say what an answer must look like: a schema, a pattern, a choice or a grammar."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rota.core.errors import RequestError
from rota.server.calls.fields import Fields, Unsupported
from rota.server.calls.sampling import FormFields, Forms, JsonOrText, sent

Choices = Annotated[list[str], Field(fail_fast=True)]


class NamedSchema(Fields):
    """A schema with a name, which is for people."""

    name: str | None = None
    description: str | None = None
    # Every answer meets its schema, strict or not.
    strict: bool | None = None
    schema_: JsonOrText = Field(default=None, alias="schema")


class ResponseFormat(Fields):
    """OpenAI's `response_format`, and SGLang's tags in the same place."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    # A schema as Hugging Face's client and server have it.
    value: JsonOrText = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None
    format: Any = None

    def asked_forms(self, where: str) -> Forms:
        """What it says about the answer's form."""
        match self.type:
            case "json_object" if self.value is not None:
                return {f"{where}.value": ("json_schema", self.value)}
            case "json_object":
                return {where: ("json_object", True)}
            case "json_schema":
                return {f"{where}.json_schema.schema": ("json_schema", self._schema(where))}
            case "structural_tag":
                return {where: ("structural_tag", self._tags())}
        return {}

    def _schema(self, where: str) -> Any:
        if self.json_schema is None:
            param = f"{where}.json_schema"
            raise RequestError.bad_field(param, f"{param} is missing; type 'json_schema' needs it.")
        return {"type": "object"} if self.json_schema.schema_ is None else self.json_schema.schema_

    def _tags(self) -> dict[str, Any]:
        return {
            name: value for name in ("structures", "triggers", "format") if (value := getattr(self, name)) is not None
        }


class StructuredOutputs(Fields):
    """vLLM's `structured_outputs`."""

    json_: JsonOrText = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: JsonOrText = None
    # There is one library, so there is nothing to fall back to.
    disable_fallback: bool | None = None
    disable_any_whitespace: Unsupported = None
    disable_additional_properties: Unsupported = None
    whitespace_pattern: Unsupported = None

    def asked_forms(self, where: str) -> Forms:
        """What it says about the answer's form."""
        self.refuse_unsupported(f"{where}.")
        asked = sent(self, ("regex", "choice", "grammar", "structural_tag"), f"{where}.")
        if self.json_ not in (None, ""):
            asked[f"{where}.json"] = ("json_schema", self.json_)
        return asked | ({f"{where}.json_object": ("json_object", True)} if self.json_object else {})


class StructuredFields(FormFields):
    """OpenAI's response_format, and the fields that other servers' clients send for the same."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonOrText = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    # Which library keeps the form changes nothing about what is kept.
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: Unsupported = None

    def asked_forms(self) -> Forms:
        """What the client sent about the answer's form."""
        asked = super().asked_forms()
        asked |= sent(self, ("guided_json", "guided_regex", "guided_choice", "guided_grammar"))
        for name in ("response_format", "structured_outputs"):
            if (given := getattr(self, name)) is not None:
                asked |= given.asked_forms(name)
        return asked
