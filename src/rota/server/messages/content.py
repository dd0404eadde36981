"""The content of a message in Anthropic's shape: blocks of text, calls, their results and thoughts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from rota.core.errors import RequestError
from rota.server.fields import Fields, Unsupported


class TextBlock(Fields):
    type: Literal["text"]
    text: str
    # Prompts are cached without a mark.
    cache_control: dict[str, Any] | None = None
    citations: Unsupported = None

    def part(self, where: str) -> dict[str, str]:
        """The block as a chat has it."""
        self.refuse_unsupported(f"{where}.")
        return {"type": "text", "text": self.text}


class ToolUseBlock(Fields):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None
    # Who calls: the model, in every answer of Rota.
    caller: dict[str, Any] | None = None


class ThinkingBlock(Fields):
    """What the model thought. Rota's own have an empty signature."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class OtherBlock(Fields):
    """A block that is refused by its type."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str | None = None

    def refusal(self, where: str) -> RequestError:
        kind = f"of type '{self.type[:100]}'" if self.type else "without a type"
        message = f"{where} is a block {kind}; Rota reads text, tool_use, tool_result and thinking."
        return RequestError.bad_field(f"{where}.type", message)


def _kind(block: Any) -> str:
    # Capital letters: `fields` leaves the names of types out of the path of an error.
    kinds = {"text": "Text", "tool_use": "Use", "tool_result": "Result", "thinking": "Thinking"}
    return kinds.get(str(block.get("type")), "Other") if isinstance(block, dict) else "Other"


def _text_kind(block: Any) -> str:
    return "Text" if _kind(block) == "Text" else "Other"


OnlyText = Annotated[Annotated[TextBlock, Tag("Text")] | Annotated[OtherBlock, Tag("Other")], Discriminator(_text_kind)]
TextBlocks = Annotated[list[OnlyText], Field(fail_fast=True)]


class ToolResultBlock(Fields):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | TextBlocks | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None

    def text(self, where: str) -> str:
        """Chat templates have no word for a failure, so the text says it."""
        parts = text_parts(self.content or "", f"{where}.content")
        text = "\n".join(part["text"] for part in parts)
        return f"Error: {text}" if self.is_error else text


Block = Annotated[
    Annotated[TextBlock, Tag("Text")]
    | Annotated[ToolUseBlock, Tag("Use")]
    | Annotated[ToolResultBlock, Tag("Result")]
    | Annotated[ThinkingBlock, Tag("Thinking")]
    | Annotated[OtherBlock, Tag("Other")],
    Discriminator(_kind),
]
Content = Annotated[list[Block], Field(fail_fast=True)]


def text_parts(content: str | list[TextBlock | OtherBlock], where: str) -> list[dict[str, str]]:
    """Texts as a chat has them. Raises RequestError for a block that is no text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    parts = []
    for index, block in enumerate(content):
        if isinstance(block, OtherBlock):
            raise block.refusal(f"{where}.{index}")
        parts.append(block.part(f"{where}.{index}"))
    return parts
