"""A chat template turns a conversation into one prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from rota.core.errors import ModelError, RequestError
from rota.text.user_text import UserText, disguised, joined

ChatMessage = Mapping[str, Any]

# A template may make control tokens of these words. Every other text of a message is its user's.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template renders. It reads `variables` by name (for example enable_thinking)."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] | None = None


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
                self.render(Conversation([{"role": "user", "content": "Hello"}]))

    def render(self, conversation: Conversation) -> str:
        """The prompt. Raises RequestError if there is no template, or the template refuses the messages."""
        template = self._template_for(conversation)
        # The import takes half a second, so it waits for the first conversation. It loads no torch.
        from transformers.utils.chat_template_utils import render_jinja_template

        tools = conversation.tools
        with _refusing():
            rendered, _ = render_jinja_template(
                conversations=[[dict(message) for message in conversation.messages]],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=template,
                add_generation_prompt=conversation.add_generation_prompt,
                **{**self._special_tokens, **(conversation.variables or {})},
            )
        return str(rendered[0])

    def render_disguised(self, conversation: Conversation, stand_ins: Mapping[str, str]) -> str:
        """The same prompt, with stand-ins in every text that is not the template's own."""
        template = self._template_for(conversation)
        with _refusing():
            rendered = _compiled_for_user_text(template).render(
                messages=[_disguised_message(message, stand_ins) for message in conversation.messages],
                tools=disguised(conversation.tools, stand_ins),
                documents=None,
                add_generation_prompt=conversation.add_generation_prompt,
                **{**self._special_tokens, **(conversation.variables or {})},
            )
        return rendered.disguised if isinstance(rendered, UserText) else str(rendered)

    @cached_property
    def literals(self) -> list[str]:
        """Every text that the template writes by itself."""
        from jinja2 import nodes

        found = list(self._special_tokens.values())
        for template in self._templates.values():
            with _refusing():
                tree = _compiled(template).environment.parse(template)
            found += [node.data for node in tree.find_all(nodes.TemplateData)]
            found += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        return found

    def _template_for(self, conversation: Conversation) -> str:
        named = "tool_use" if conversation.tools else "default"
        if (template := self._templates.get(named) or self._templates.get("default")) is None:
            raise RequestError.bad_field(
                "messages",
                f"The model in {self._folder} has no chat template; send a prompt to be completed instead, "
                "or add a chat_template.jinja to the folder.",
            )
        return template


def _compiled(template: str) -> Any:
    # Its environment has the filters and globals that transformers gives to every template.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(template)


@lru_cache(8)
def _compiled_for_user_text(template: str) -> Any:
    environment = _compiled(template).environment.overlay()
    environment.concat = joined  # macros and blocks must not lose the disguise
    return environment.from_string(template)


@contextmanager
def _refusing() -> Iterator[None]:
    """What a template raises is a refusal of the messages."""
    try:
        yield
    # Broad: the template is a program that Rota did not write. On odd messages it may raise any exception.
    except Exception as error:
        reason = str(error).rstrip(".")
        raise RequestError.bad_field(
            "messages", f"The model's chat template does not accept these messages: {reason}."
        ) from error


def _disguised_message(message: ChatMessage, stand_ins: Mapping[str, str]) -> dict[str, Any]:
    return {
        name: value if name == "role" and value in ROLES else disguised(value, stand_ins)
        for name, value in message.items()
    }


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
