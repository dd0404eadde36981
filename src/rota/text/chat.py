"""A chat template turns a conversation into one prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from rota.core.errors import ModelError, RequestError
from rota.text.template_words import TemplateWords, words_of
from rota.text.tools.hermes_prompt import LITERALS, in_hermes_form
from rota.text.user_text import UserText, disguised, joined

ChatMessage = Mapping[str, Any]
Messages = Sequence[ChatMessage]
Tools = Sequence[Mapping[str, Any]] | None

# A template may make control tokens of these words. Every other text of a message is its user's.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
# Roles of special tokens, which are variables of every template.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What Rota and transformers hand to a template, or to the function that renders it.
_OWN_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "conversations", "chat_template", "tokenize"}
    | {"return_assistant_tokens_mask", "continue_final_message"}
)
# The role of a tool's result, and what Llama's templates call it.
_RESULT_ROLES = frozenset({"tool", "ipython"})


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template renders. It reads `variables` by name (for example enable_thinking)."""

    messages: Messages
    tools: Tools = None
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] | None = None


class ChatTemplate:
    """The template of one model folder. transformers renders it, as it did for the template's author."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
        self._folder = folder
        self._templates = _templates(folder, settings)
        self._special_tokens = special_tokens

    @property
    def default(self) -> str | None:
        """The text of the template, if the folder has one."""
        return self._templates.get("default")

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

        messages, tools = self._as_known(conversation.messages, conversation.tools)
        with _refusing():
            rendered, _ = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=template,
                add_generation_prompt=conversation.add_generation_prompt,
                **{**(conversation.variables or {}), **self._special_tokens},
            )
        return str(rendered[0])

    def render_disguised(self, conversation: Conversation, stand_ins: Mapping[str, str]) -> str:
        """The same prompt, with stand-ins in every text that is not the template's own."""
        template = self._template_for(conversation)
        messages, tools = self._as_known(
            [_disguised_message(message, stand_ins) for message in conversation.messages],
            disguised(conversation.tools, stand_ins),
        )
        variables = {name: disguised(value, stand_ins) for name, value in (conversation.variables or {}).items()}
        with _refusing():
            rendered = _compiled_for_user_text(template).render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=conversation.add_generation_prompt,
                **{**variables, **self._special_tokens},
            )
        return rendered.disguised if isinstance(rendered, UserText) else str(rendered)

    @cached_property
    def literals(self) -> list[str]:
        """Every text that the template writes by itself."""
        own = () if self.knows_tools else LITERALS
        return [*self._special_tokens.values(), *self._words.data, *self._words.constants, *own]

    @cached_property
    def text(self) -> str:
        """The text of all templates of the folder."""
        return "\n".join(self._templates.values())

    def reads(self, variable: str) -> bool:
        """Whether the template reads a variable."""
        return variable in self._words.names

    def check_variable(self, name: str, param: str) -> None:
        """Raises RequestError for a variable that a client may not set, because Rota does."""
        if name in _OWN_VARIABLES or name in SPECIAL_TOKENS:
            message = f"{param} sets what Rota itself gives the chat template; set other variables there."
            raise RequestError.bad_field(param, message)

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the template renders tools and their results. If not, they are rendered in Hermes' form."""
        if "tool_use" in self._templates:
            return True
        return "tools" in self._words.names and not _RESULT_ROLES.isdisjoint(self._words.constants)

    @cached_property
    def _words(self) -> TemplateWords:
        with _refusing():
            return words_of([_parsed(template) for template in self._templates.values()])

    @cached_property
    def _has_system(self) -> bool:
        """Whether the template takes a message of the system."""
        template = self._templates.get("default", "")
        messages = [{"role": role, "content": "x"} for role in ("system", "user")]
        try:
            _compiled(template).render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        # Broad: the template is a program that Rota did not write.
        except Exception:
            return False
        return True

    def _as_known(self, messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
        """The messages and tools as the template knows them."""
        if self.knows_tools or not _has_tools(messages, tools):
            return messages, tools
        return in_hermes_form(messages, tools, self._has_system), None

    def _template_for(self, conversation: Conversation) -> str:
        named = "tool_use" if _has_tools(conversation.messages, conversation.tools) else "default"
        if (template := self._templates.get(named) or self._templates.get("default")) is None:
            raise RequestError.bad_field(
                "messages",
                f"The model in {self._folder} has no chat template; send a prompt to be completed instead, "
                "or add a chat_template.jinja to the folder.",
            )
        return template


def _has_tools(messages: Messages, tools: Tools) -> bool:
    """Whether a conversation has tools, calls or results."""
    return bool(tools) or any(message["role"] == "tool" or "tool_calls" in message for message in messages)


def _parsed(template: str) -> Any:
    return _compiled(template).environment.parse(template)


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
