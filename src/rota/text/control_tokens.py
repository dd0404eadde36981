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
from rota.text.user_text import exchanged

# Two areas of Unicode that have no characters of their own. Stand-ins are taken where the users' texts have none.
_PRIVATE_AREAS = [
    range(start, start + 256) for plane in (0xF0000, 0x100000) for start in range(plane, plane + 0x4000, 256)
]

Render = Callable[[Mapping[str, str]], str]


class ControlTokens:
    """The control tokens of one tokenizer under one template, and the tokens of texts that spell them."""

    def __init__(self, library: LibraryTokenizer, literals: Iterable[str]) -> None:
        """`literals` are all texts that the template writes by itself."""
        self._library = library
        self._literals = list(literals)
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
        return any(all(character in text for character in needed) for needed in self._needed)

    def tokens(self, text: str, plain: Sequence[int], render: Render) -> Sequence[int]:
        """The tokens of a conversation that may spell control tokens. `plain` are the tokens of its `text`.

        `render` renders it again, with stand-ins. Raises RequestError if a user's text cannot be told from the
        template's.
        """
        stand_ins = self._stand_ins(text)
        disguised = render(stand_ins)
        originals = {stand_in: character for character, stand_in in stand_ins.items()}
        if exchanged(disguised, originals) != text:
            raise _refusal()
        if self._is_harmless(text, disguised, stand_ins):
            return plain
        tokens = self._as_text(disguised, stand_ins)
        own = [found for found in self._pattern.findall(disguised) if found in self._compared.values()]
        if [self._compared[token] for token in tokens if token in self._compared] != own:
            raise _refusal()
        return tokens

    def _is_harmless(self, text: str, disguised: str, stand_ins: Mapping[str, str]) -> bool:
        """Whether the same control tokens stand in both texts, so that all of them are the template's."""
        if self._pattern.findall(disguised) != self._pattern.findall(text):
            return False
        normalizer = self._library.normalizer
        if not (self._is_normalized and normalizer):
            return True
        marks = "".join(stand_ins.values())
        found = [self._pattern.findall(normalizer.normalize_str(one)) for one in (disguised, text)]
        return found[0] == found[1] and marks in normalizer.normalize_str(marks)

    def _as_text(self, disguised: str, stand_ins: Mapping[str, str]) -> Sequence[int]:
        with self._lock:  # the normalizer belongs to this conversation
            library = self._late_library
            library.normalizer = _restoring(stand_ins, self._library.normalizer)
            tokens: list[int] = library.encode_batch_fast([disguised], add_special_tokens=False)[0].ids
        return tokens

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Finds control tokens as the tokenizer does: from the left, and the longest first."""
        return re.compile("|".join(map(re.escape, sorted(self._spellings, key=len, reverse=True))) or "(?!)")

    @cached_property
    def _compared(self) -> dict[int, str]:
        """The control tokens that a tokenizer finds wherever they are spelled, and nowhere else."""
        unknown = getattr(self._library.model, "unk_token", None)
        return {
            token: one.content
            for token, one in self._tokens.items()
            if not one.single_word and one.content and one.content != unknown
        }

    def _is_written(self, content: str) -> bool:
        return bool(content.strip()) and any(content in literal for literal in self._literals)

    @cached_property
    def _spellings(self) -> list[str]:
        return [token.content for token in self._tokens.values() if token.content]

    @cached_property
    def _needed(self) -> set[str]:
        """For every control token the signs that a user must write.

        Letters and digits may come from a role or a date. A literal may also lie in the middle of a control token.
        """
        literals = {*self._literals} - {*self._spellings}
        middles = [literal for literal in literals if any(literal in spelling for spelling in self._spellings)]
        signs = {one for one in "".join(self._spellings) if not one.isalnum()} - {*"".join(middles)}
        return {"".join(sorted(signs & {*spelling})) for spelling in self._spellings}

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

    def _stand_ins(self, text: str) -> dict[str, str]:
        """A stand-in for every character of the text that may begin a control token."""
        firsts = {spelling[0] for spelling in self._spellings}
        dangerous = set("".join(self._spellings)) if self._is_completed_by_users else firsts
        replaced = sorted(one for one in {*text, *dangerous} if not dangerous.isdisjoint(self._forms(one)))
        for area in _PRIVATE_AREAS:
            if len(replaced) <= len(area) and not re.search(f"[{chr(area[0])}-{chr(area[-1])}]", text):
                return {character: chr(area[index]) for index, character in enumerate(replaced)}
        raise _refusal()

    def _forms(self, character: str) -> set[str]:
        """The characters that a template or the tokenizer may make of one character."""
        forms = {character, *character.lower(), *character.upper()}
        if self._is_normalized and self._library.normalizer:
            forms.update(self._library.normalizer.normalize_str(character))
        return forms

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


def _restoring(stand_ins: Mapping[str, str], normalizer: Any) -> Any:
    restore = [normalizers.Replace(stand_in, character) for character, stand_in in stand_ins.items()]
    return normalizers.Sequence([*restore, normalizer] if normalizer else restore)


def _refusal() -> RequestError:
    message = (
        "The messages hold text that looks like a control token of the model, and the model's chat template mixes it "
        "with its own control tokens; send the messages without that text."
    )
    return RequestError.bad_field("messages", message)
