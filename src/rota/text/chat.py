"""A chat template turns a conversation into one prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rota.core.errors import ModelError, RequestError

ChatMessage = Mapping[str, Any]


class ChatTemplate:
    """The template of one model folder. transformers renders it, as it did for the template's author."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
        self._folder = folder
        self._templates = _templates(folder, settings)
        self._special_tokens = special_tokens

    def warm_up(self) -> None:
        """Load the renderer and compile the template, so that no conversation waits for that."""
        if "default" in self._templates:
            with suppress(RequestError):  # a template that refuses this message is compiled all the same
                self.render([{"role": "user", "content": "Hello"}], None, True, {})

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        template = self._templates.get("tool_use" if tools else "default") or self._templates.get("default")
        if template is None:
            raise RequestError.bad_field(
                "messages",
                f"The model in {self._folder} has no chat template; send a prompt to be completed instead, "
                "or add a chat_template.jinja to the folder.",
            )
        # The import takes half a second, so it waits for the first conversation. It loads no torch.
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, _ = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **variables},
            )
        # Broad: the template is a program that Rota did not write. On odd messages it may raise any exception.
        except Exception as error:
            reason = str(error).rstrip(".")
            raise RequestError.bad_field(
                "messages", f"The model's chat template does not accept these messages: {reason}."
            ) from error
        return str(rendered[0])


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return {"default": path.read_text("utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} is not text ({error}); restore it from the model's source.") from error
    match settings.get("chat_template"):
        case str(template):
            return {"default": template}
        case [*named]:
            return {entry["name"]: entry["template"] for entry in named}
        case _:
            return {}
