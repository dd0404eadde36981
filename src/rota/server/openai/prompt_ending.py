"""The fields that say where a conversation's prompt ends: at a new answer, or inside the last message."""

from __future__ import annotations

from rota.core.errors import RequestError
from rota.server.fields import Fields


class PromptEnding(Fields):
    """vLLM's fields, which its clients send with a conversation."""

    # False: the template does not begin an answer, and the model goes on from the last message.
    add_generation_prompt: bool | None = None
    # The answer goes on with the last message, which is then not closed.
    continue_final_message: bool | None = None

    def is_continued(self) -> bool:
        """Whether the answer goes on with the last message. Raises RequestError if it is to begin anew as well."""
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message goes on with the last message, so add_generation_prompt must be false."
            raise RequestError.bad_field("continue_final_message", message)
        return bool(self.continue_final_message)

    def has_generation_prompt(self) -> bool:
        """Whether the template begins an answer."""
        return self.add_generation_prompt is not False and not self.continue_final_message
