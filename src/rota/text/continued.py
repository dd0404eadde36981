"""A prompt that ends with the text of its last message lets the model go on with that message."""

from __future__ import annotations

from collections.abc import Sequence

from rota.core.errors import RequestError
from rota.text.chat import ChatMessage

# Private characters of Unicode. A template trims spaces around a text, but not in front of these.
_MARK = "\ue0d1\ue0d2\ue0d3"


def marked(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The same messages, with a mark behind the last text. Raises RequestError if there is no text."""
    *others, last = messages
    if not isinstance(last.get("content"), str):
        raise RequestError.bad_field(
            "continue_final_message", "continue_final_message needs a text in the last message, to go on with it."
        )
    return [*others, {**last, "content": last["content"] + _MARK}]


def up_to_mark(prompt: str) -> str:
    """The prompt up to the mark. Raises RequestError if the template has lost it."""
    before, mark, _ = prompt.rpartition(_MARK)
    if not mark:
        message = "The model's chat template does not write the last message as it is, so it cannot be continued."
        raise RequestError.bad_field("continue_final_message", message)
    return before
