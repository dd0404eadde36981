"""A user's text never becomes a control token: only the chat template writes those."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, SupportsIndex

from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as LibraryTokenizer

from rota.core.errors import RequestError

# ── user text ───────────────────────────────────────────────────────────────────────────────────────────────────────
# A user's text goes through a chat template in disguise, so that it can be told from the template's own text.
#
# The characters that could begin a control token are replaced by stand-ins: characters of a private area of Unicode,
# one for one. To the template's tests the text still looks as the user wrote it: comparing, searching, splitting and
# trimming see the real characters. Everything else sees the stand-ins, also code that knows nothing of them, such as
# `"".join`. So a way through the template that is not foreseen here gives stand-ins as well, and never real characters.

# The methods of str for which the real characters answer.
_ASKED_OF_THE_PLAIN_TEXT = (
    *("__contains__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("startswith", "endswith", "find", "rfind", "index", "rindex", "count"),
    *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isnumeric", "isspace", "islower", "isupper", "istitle"),
)


class UserText(str):
    """A text with stand-ins, and beside it `plain`: the same text with the real characters, index by index."""

    __slots__ = ("plain",)

    plain: str

    @classmethod
    def of(cls, disguised: str, plain: str) -> UserText:
        assert len(plain) == str.__len__(disguised), "a stand-in replaces one character"
        text = cls(disguised)
        text.plain = plain
        return text

    @property
    def disguised(self) -> str:
        return str.__str__(self)

    # Jinja calls str() on everything, and must not lose the disguise.
    def __str__(self) -> str:
        return self

    def __hash__(self) -> int:
        return hash(self.plain)

    def __eq__(self, other: object) -> bool:
        return self.plain == _plain(other)

    def __ne__(self, other: object) -> bool:
        return self.plain != _plain(other)

    def __iter__(self) -> Iterator[str]:
        return (self._cut(index, index + 1) for index in range(len(self.plain)))

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return UserText.of(str.__getitem__(self, key), self.plain[key])

    def __add__(self, other: str) -> str:
        return joined((self, other))

    def __radd__(self, other: str) -> str:
        return joined((other, self))

    def __mul__(self, count: SupportsIndex) -> str:
        return joined([self] * int(count))

    __rmul__ = __mul__

    def strip(self, chars: str | None = None, /) -> str:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> str:
        return self._cut(len(self.plain) - len(self.plain.lstrip(_plain(chars))), len(self.plain))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._cut(0, len(self.plain.rstrip(_plain(chars))))

    def removeprefix(self, prefix: str, /) -> str:
        return self._cut(len(self.plain) - len(self.plain.removeprefix(_plain(prefix))), len(self.plain))

    def removesuffix(self, suffix: str, /) -> str:
        return self._cut(0, len(self.plain.removesuffix(_plain(suffix))))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(self.plain.split(_plain(sep), maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(self.plain.rsplit(_plain(sep), maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._located(self.plain.splitlines(keepends), 0)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._located(self.plain.partition(_plain(sep)), 0)
        return before, found, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._located(self.plain.rpartition(_plain(sep)), 0)
        return before, found, after

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return super().replace(old, new, count)
        first, *others = self.split(old, count)
        return joined([first, *(part for other in others for part in (new, other))])

    def _cut(self, start: int, end: int) -> str:
        return self[start:end]

    def _located(self, pieces: Iterable[str], gap: int) -> list[str]:
        """The same pieces of this text. `gap`: how many characters other than spaces lie between two pieces."""
        found, at = [], 0
        for piece in pieces:
            at = self.plain.find(piece, at)
            found.append(self._cut(at, at + len(piece)))
            at += len(piece) + gap
        return found


def _asked_of_the_plain_text(name: str) -> Callable[..., Any]:
    ask = getattr(str, name)

    def answer(self: UserText, *arguments: Any) -> Any:
        return ask(self.plain, *map(_plain, arguments))

    return answer


for _name in _ASKED_OF_THE_PLAIN_TEXT:
    setattr(UserText, _name, _asked_of_the_plain_text(_name))


def joined(parts: Iterable[str]) -> str:
    """Texts of a user and of a template in a row. Each character stays what it is."""
    parts = list(parts)
    return UserText.of("".join(parts), "".join(map(_plain, parts)))


def exchanged(text: str, characters: Mapping[str, str]) -> str:
    """The text with other characters in the place of some. For a few, this is much faster than `str.translate`."""
    for old, new in characters.items():
        text = text.replace(old, new)
    return text


def disguised(value: Any, stand_ins: Mapping[str, str]) -> Any:
    """The same value with every text in it in disguise, also a text that is a key."""
    match value:
        case str():
            return UserText.of(exchanged(value, stand_ins), value)
        case Mapping():
            return {disguised(key, stand_ins): disguised(one, stand_ins) for key, one in value.items()}
        case list() | tuple():
            return [disguised(one, stand_ins) for one in value]
    return value


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a value, also a text that is a key."""
    match value:
        case str():
            yield value
        case Mapping():
            for key, one in value.items():
                yield from texts_in(key)
                yield from texts_in(one)
        case list() | tuple():
            for one in value:
                yield from texts_in(one)


def _plain(value: Any) -> Any:
    match value:
        case UserText():
            return value.plain
        case tuple():
            return tuple(map(_plain, value))
    return value


# ── control tokens ──────────────────────────────────────────────────────────────────────────────────────────────────
# A user's text never becomes a control token: only the chat template writes those.
#
# Control tokens are the special tokens of a tokenizer, and other added tokens that the template itself writes (for
# example `<tool_call>`). Most texts cannot spell one, and a quick look at their characters shows that. Any other
# conversation is rendered a second time with the users' texts in disguise (`user_text`). The tokens of both renderings
# tell whether a text spelled a control token. If so, the disguised rendering is tokenized. The tokenizer looks for
# control tokens first. Only then are the stand-ins replaced by the real characters, and those become ordinary tokens.

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
