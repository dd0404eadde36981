"""A user's text goes through a chat template in disguise, so that it can be told from the template's own text.

The characters that could begin a control token are replaced by stand-ins: characters of a private area of Unicode,
one for one. To the template's tests the text still looks as the user wrote it: comparing, searching, splitting and
trimming see the real characters. Everything else sees the stand-ins, also code that knows nothing of them, such as
`"".join`. So a way through the template that is not foreseen here gives stand-ins as well, and never real characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

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
