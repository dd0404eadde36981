"""A user's text never becomes a control token: only the chat template writes those.

Control tokens are the special tokens of a tokenizer, and other added tokens that the template itself writes (for
example `<tool_call>`). Most texts cannot spell one, and a quick look at their characters shows that. Any other
conversation is rendered a second time with the users' texts in disguise (`user_text`). The tokens of both renderings
tell whether a text spelled a control token. If so, the disguised rendering is tokenized. The tokenizer looks for
control tokens first. Only then are the stand-ins replaced by the real characters, and those become ordinary tokens.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as LibraryTokenizer

from rota.core.errors import RequestError

# Two areas of Unicode that have no characters of their own. Stand-ins are taken where the users' texts have none.
_PRIVATE_AREAS = [
    range(start, start + 256) for plane in (0xF0000, 0x100000) for start in range(plane, plane + 0x4000, 256)
]

Render = Callable[[Mapping[int, str]], str]


class ControlTokens:
    """The control tokens of one tokenizer under one template, and the tokens of texts that spell them."""

    def __init__(self, library: LibraryTokenizer, literals: Iterable[str]) -> None:
        """`literals` are all texts that the template writes by itself."""
        self._library = library
        self._literals = list(literals)
        self._unknown = library.token_to_id(getattr(library.model, "unk_token", None) or "")
        added = library.get_added_tokens_decoder()
        self._tokens = {token: one for token, one in added.items() if one.special or self._is_written(one.content)}
        self._lock = threading.Lock()

    def can_be_spelled(self, texts: Iterable[str]) -> bool:
        """Whether the texts hold the characters for a control token. False is certain, and quick."""
        if self._is_completed_by_users:
            return True
        text = "\n".join(texts)
        if self._is_normalized and self._library.normalizer:
            text += str(self._library.normalizer.normalize_str(text))
        return any(first in text and last in text for first, last in self._borders)

    def tokens(self, text: str, plain: Sequence[int], render: Render) -> Sequence[int]:
        """The tokens of a conversation that may spell control tokens. `plain` are the tokens of its `text`.

        `render` renders it again, with stand-ins. Raises RequestError if a user's text cannot be told from the
        template's.
        """
        stand_ins = self._stand_ins(text)
        disguised = render(stand_ins)
        originals = {ord(stand_in): chr(character) for character, stand_in in stand_ins.items()}
        if disguised.translate(originals) != text:
            raise _refusal()
        if self._keeps(stand_ins) and self._controls(_encode(self._library, disguised)) == self._controls(plain):
            return plain
        return self._as_text(disguised, stand_ins)

    def _as_text(self, disguised: str, stand_ins: Mapping[int, str]) -> Sequence[int]:
        with self._lock:  # the normalizer belongs to this conversation
            library = self._late_library
            library.normalizer = self._library.normalizer
            own = self._controls(_encode(library, disguised))
            library.normalizer = _restoring(stand_ins, self._library.normalizer)
            tokens = _encode(library, disguised)
        if self._controls(tokens) != own:
            raise _refusal()
        return tokens

    def _is_written(self, content: str) -> bool:
        return bool(content.strip()) and any(content in literal for literal in self._literals)

    @cached_property
    def _spellings(self) -> list[str]:
        return [token.content for token in self._tokens.values() if token.content]

    @cached_property
    def _borders(self) -> set[tuple[str, str]]:
        """The first and the last character of every control token."""
        return {(spelling[0], spelling[-1]) for spelling in self._spellings}

    @cached_property
    def _is_normalized(self) -> bool:
        return any(token.normalized for token in self._tokens.values())

    @cached_property
    def _is_completed_by_users(self) -> bool:
        """Whether the template writes a part of a control token beside a user's text, as in `'<|' + name + '|>'`.

        If not, a user must write the first character of a control token and its last. A letter may also come from a
        role or a date.
        """
        return any(
            spelling[0].isalnum()
            or spelling[-1].isalnum()
            or any(
                literal.endswith(spelling[:size]) or literal.startswith(spelling[size:])
                for literal in self._literals
                for size in range(1, len(spelling))
            )
            for spelling in self._spellings
        )

    def _stand_ins(self, text: str) -> dict[int, str]:
        """A stand-in for every character of the text that may begin a control token."""
        firsts = {first for first, _ in self._borders}
        dangerous = set("".join(self._spellings)) if self._is_completed_by_users else firsts
        replaced = sorted(one for one in {*text, *dangerous} if not dangerous.isdisjoint(self._forms(one)))
        for area in _PRIVATE_AREAS:
            if len(replaced) <= len(area) and not re.search(f"[{chr(area[0])}-{chr(area[-1])}]", text):
                return {ord(character): chr(area[index]) for index, character in enumerate(replaced)}
        raise _refusal()

    def _forms(self, character: str) -> set[str]:
        """The characters that a template or the tokenizer may make of one character."""
        forms = {character, *character.lower(), *character.upper()}
        if self._is_normalized and self._library.normalizer:
            forms.update(self._library.normalizer.normalize_str(character))
        return forms

    def _keeps(self, stand_ins: Mapping[int, str]) -> bool:
        """Whether the tokenizer's own normalizer leaves stand-ins alone. Then they hide normalized tokens as well."""
        if not (self._is_normalized and self._library.normalizer):
            return True
        text = "".join(stand_ins.values())
        return text in self._library.normalizer.normalize_str(text)

    def _controls(self, tokens: Sequence[int]) -> list[int]:
        # The token of unknown characters is special too, but no text has to spell it.
        return [token for token in tokens if token in self._tokens and token != self._unknown]

    @cached_property
    def _late_library(self) -> LibraryTokenizer:
        """The same tokenizer, but it finds all control tokens before it normalizes a text."""
        added = {
            token: _as_it_is_written(one) if token in self._tokens else one
            for token, one in sorted(self._library.get_added_tokens_decoder().items())
        }
        late = LibraryTokenizer(self._library.model)  # shares the vocabulary, which is large
        late.pre_tokenizer = self._library.pre_tokenizer
        late.add_tokens(list(added.values()))
        assert late.get_added_tokens_decoder().keys() == added.keys(), "the library numbers added tokens in their order"
        return late


def _as_it_is_written(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=token.special,
    )


def _restoring(stand_ins: Mapping[int, str], normalizer: Any) -> Any:
    restore = [normalizers.Replace(stand_in, chr(character)) for character, stand_in in stand_ins.items()]
    return normalizers.Sequence([*restore, normalizer] if normalizer else restore)


def _encode(library: LibraryTokenizer, text: str) -> Sequence[int]:
    tokens: list[int] = library.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return tokens


def _refusal() -> RequestError:
    message = (
        "The messages hold text that looks like a control token of the model, and the model's chat template mixes it "
        "with its own control tokens; send the messages without that text."
    )
    return RequestError.bad_field("messages", message)
