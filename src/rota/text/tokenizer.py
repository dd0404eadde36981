"""A tokenizer turns text into tokens as its model folder says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.processors import TemplateProcessing

from rota.core.errors import ModelError, RequestError
from rota.text.chat import SPECIAL_TOKENS, ChatMessage, ChatTemplate, Conversation
from rota.text.control_tokens import ControlTokens, texts_in
from rota.text.pieces import Detokenizer, TokenPieces, UnknownDecoderError

# ── continued ───────────────────────────────────────────────────────────────────────────────────────────────────────
# A prompt that ends with the text of its last message lets the model go on with that message.

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


class Tokenizer:
    """The tokenizer of a folder in Hugging Face format.

    Detokenizers read `pieces`. `eos_ids` are all tokens that end an answer.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = folder = Path(folder)
        if not folder.is_dir():
            raise ModelError(f"There is no model folder at {folder}; name a folder in Hugging Face format.")
        settings = {
            **_read_json(folder / "special_tokens_map.json"),
            **_read_json(folder / "tokenizer_config.json"),
        }
        self.settings: Mapping[str, Any] = settings
        special_tokens = _special_tokens(settings)
        self._library = _load(folder)
        _add_special_tokens_as_asked(self._library, settings, special_tokens)
        try:
            self.pieces = TokenPieces(self._library)
        except UnknownDecoderError as error:
            raise ModelError(
                f"The tokenizer in {folder} decodes in a way that cannot be streamed ({error}); "
                "byte-level and sentencepiece tokenizers can."
            ) from error
        self.chat = ChatTemplate(folder, settings, special_tokens)
        self.vocab_size: int = self._library.get_vocab_size()
        self.eos_ids = self._find_eos_ids(folder, special_tokens)

    @cached_property
    def longest_token(self) -> int:
        """The most characters that one token stands for."""
        return max(map(len, self._library.get_vocab(with_added_tokens=True)), default=1)

    @property
    def saved(self) -> str:
        """The tokenizer's file, as its library saves it."""
        return self._library.to_str()

    @cached_property
    def ids(self) -> int:
        """Token ids lie below it. Some below it may have no token."""
        return max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def special_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """The ids of those texts that are special tokens."""
        found = {text: self._library.token_to_id(text) for text in texts}
        return {text: token for text, token in found.items() if token in self.pieces.special}

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The tokens of a text, with the special tokens that the model folder puts around it."""
        return tuple(self._encodings([text], add_special_tokens)[0].ids)

    def encode_each(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """The tokens of each text, without special tokens around it."""
        return [tuple(one.ids) for one in self._encodings(texts, add_special_tokens=False)]

    def warm_up(self) -> None:
        """Do the work that the first text and the first conversation would wait for. It may take a second."""
        _ = self.longest_token
        self.chat.warm_up()
        with suppress(RequestError):  # a template that cannot be read refuses every conversation
            self._control_tokens.can_be_spelled(())

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, without special tokens.

        It differs from the library where a byte token makes no character: only that byte is U+FFFD. The library
        replaces all byte tokens around it as well, but a stream has already sent those.
        """
        detokenizer = Detokenizer(self.pieces)
        return detokenizer.push(tokens) + detokenizer.finish()

    def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        is_continued: bool = False,
    ) -> tuple[int, ...]:
        """The tokens of a conversation. Only the template writes control tokens; texts that spell one stay texts.

        The template reads `variables` by name (for example enable_thinking). `is_continued`: the tokens end with the
        last message's text, so that the model goes on with it.
        """
        sent, end = (marked(messages), up_to_mark) if is_continued else (messages, str)
        conversation = Conversation(sent, tools, add_generation_prompt, variables)
        text = end(self.chat.render(conversation))
        # Templates write their own special tokens, and there must be no second BOS.
        tokens = self.encode(text, add_special_tokens=False)
        if not self._control_tokens.can_be_spelled(texts_in([*messages, *(tools or ()), variables])):
            return tokens

        def render(stand_ins: Mapping[str, str]) -> str:
            return end(self.chat.render_disguised(conversation, stand_ins))

        return tuple(self._control_tokens.tokens(text, tokens, render))

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self._library, self.chat.literals)

    def _encodings(self, texts: Sequence[str], add_special_tokens: bool) -> list[Any]:
        try:
            # This call of the library lets other threads run meanwhile, and keeps no offsets.
            return list(self._library.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens))
        except TypeError as error:  # JSON can hold "\ud800", but UTF-8 cannot
            raise RequestError.bad_field(
                "prompt", "The text holds half a surrogate pair, which is not Unicode; send the text without it."
            ) from error

    def _find_eos_ids(self, folder: Path, special_tokens: Mapping[str, str]) -> frozenset[int]:
        """Instruct models name several tokens: the tokenizer's own, and those in the generation config."""
        found: list[int | None] = [self._library.token_to_id(special_tokens.get("eos_token", ""))]
        for name in ("generation_config.json", "config.json"):
            listed = _read_json(folder / name).get("eos_token_id")
            if listed is not None:
                found += listed if isinstance(listed, list) else [listed]
                break
        return frozenset(token for token in found if token is not None)


def _load(folder: Path) -> LibraryTokenizer:
    path = folder / "tokenizer.json"
    try:
        library = LibraryTokenizer.from_file(str(path)) if path.is_file() else _convert(folder)
    # Broad: the library raises a bare Exception for a file that it cannot parse, and transformers may raise any error.
    except Exception as error:
        raise ModelError(_problem(path, error)) from error
    # A folder may have been saved with limits, and those would cut prompts short silently.
    library.no_truncation()
    library.no_padding()
    return library


def _problem(path: Path, error: Exception) -> str:
    if path.is_file():
        return f"{path} is not a tokenizer ({error}); restore it from the model's source."
    return (
        f"There is no tokenizer.json in {path.parent}, and transformers finds no other tokenizer there; "
        "add the model's tokenizer.json."
    )


def _convert(folder: Path) -> LibraryTokenizer:
    """For folders without a tokenizer.json. This is slow, and the only call here that loads torch."""
    from transformers import AutoTokenizer

    library = AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    assert isinstance(library, LibraryTokenizer)
    return library


def _add_special_tokens_as_asked(
    library: LibraryTokenizer, settings: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """If tokenizer_config.json says whether to add BOS or EOS, it overrules tokenizer.json."""
    asked = {name: settings.get(f"add_{name}") for name in ("bos_token", "eos_token")}
    if all(wanted is None for wanted in asked.values()):
        return
    before, after = (
        [token] if wanted and library.token_to_id(token := special_tokens.get(name, "")) is not None else []
        for name, wanted in asked.items()
    )
    library.post_processor = TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(token, library.token_to_id(token)) for token in {*before, *after}],
    )


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role. A file writes one as a string, or as an object with its content."""
    found = {}
    for name in SPECIAL_TOKENS:
        match settings.get(name):
            case str(content) | {"content": str(content)}:
                found[name] = content
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """An absent file is empty. A broken file is an error."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not JSON ({error}); restore it from the model's source.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object; restore it from the model's source.")
    return content
