"""A chat template turns a conversation into one prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import groupby
from pathlib import Path
from typing import Any

from rota.core.errors import ModelError, RequestError
from rota.text.control_tokens import UserText, disguised, joined

# ── template words ──────────────────────────────────────────────────────────────────────────────────────────────────
# A template's words tell what it knows: the texts that it writes or compares, and the names that it reads.


@dataclass(frozen=True, slots=True)
class TemplateWords:
    """`data`: texts outside of expressions. `constants`: texts inside of them. `names`: variables."""

    data: tuple[str, ...]
    constants: tuple[str, ...]
    names: frozenset[str]


# ── hermes prompt ───────────────────────────────────────────────────────────────────────────────────────────────────
# Hermes' form puts tools, calls and results into plain messages, for a chat template that knows none of them.
#
# The built-in adapter `tools` is trained on exactly this form. A changed character here means to train it again.

_BEFORE_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_AFTER_TOOLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_CALL = ("<tool_call>\n", "\n</tool_call>")
_RESULT = ("<tool_response>\n", "\n</tool_response>")

# Every text that this form writes by itself.
LITERALS = (_BEFORE_TOOLS, _AFTER_TOOLS, *_CALL, *_RESULT)

ChatMessage = Mapping[str, Any]
Messages = Sequence[ChatMessage]
Tools = Sequence[Mapping[str, Any]] | None


def in_hermes_form(messages: Messages, tools: Tools, has_system: bool = True) -> list[ChatMessage]:
    """The same conversation with roles system, user and assistant alone. `has_system`: the template takes that role.

    Texts are put together by `+` alone, because users' texts may be in disguise (`user_text`).
    """
    plain: list[ChatMessage] = []
    for is_result, group in groupby(messages, lambda message: bool(message["role"] == "tool")):
        together = list(group)
        plain += [_results(together)] if is_result else map(_with_calls, together)
    return _with_tools(plain, _BEFORE_TOOLS + _listed(tools) + _AFTER_TOOLS, has_system) if tools else plain


def _with_tools(messages: list[ChatMessage], tools: str, has_system: bool) -> list[ChatMessage]:
    """The tools stand behind the system's own words, or before the user's if there can be no system message."""
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": first["content"] + "\n\n" + tools}, *messages[1:]]
    if has_system:
        return [{"role": "system", "content": tools}, *messages]
    if first["role"] == "user":
        return [{**first, "content": tools + "\n\n" + first["content"]}, *messages[1:]]
    return [{"role": "user", "content": tools}, *messages]


def _results(messages: list[ChatMessage]) -> ChatMessage:
    """Results that follow each other share a message."""
    first, *others = [_RESULT[0] + message["content"] + _RESULT[1] for message in messages]
    return {"role": "user", "content": reduce(lambda text, result: text + "\n" + result, others, first)}


def _with_calls(message: ChatMessage) -> ChatMessage:
    """The calls of a message stand behind its words."""
    if "tool_calls" not in message:
        return message
    content = message["content"]
    for call in message["tool_calls"]:
        content += ("\n" if content else "") + _CALL[0] + _as_json(call["function"]) + _CALL[1]
    return {"role": message["role"], "content": content}


def _listed(tools: Sequence[Mapping[str, Any]]) -> str:
    return "".join("\n" + _as_json(tool) for tool in tools)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


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
        from jinja2 import nodes

        with _refusing():
            trees = [_compiled(template).environment.parse(template) for template in self._templates.values()]
        constants = [node.value for tree in trees for node in tree.find_all(nodes.Const)]
        return TemplateWords(
            tuple(node.data for tree in trees for node in tree.find_all(nodes.TemplateData)),
            tuple(value for value in constants if isinstance(value, str)),
            frozenset(node.name for tree in trees for node in tree.find_all(nodes.Name)),
        )

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
