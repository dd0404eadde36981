"""Which bytes of UTF-8 a token stands for, and how tokens become text as they come, never half a character."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.decoders import Decoder

# ── pieces ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# This table says which bytes of UTF-8 a token stands for.
#
# Tokenizers of the Llama family write bytes as tokens in one of three ways. Their decoder names the way:
#
#     byte-level       every byte is a visible character: " café" is spelled "ĠcafÃ©"
#     sentencepiece    a space is "▁", a rare byte "<0xE2>", and one space is put before the text
#     none             tokens are words, joined by spaces
#
# In all three the text of several tokens is their bytes in a row, without the space put before. So a table and a
# UTF-8 decoder are enough to stream text. The library need not decode an ever longer list of tokens.

Spell = Callable[[str], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnknownDecoderError(ValueError):
    """The tokenizer's decoder does more than put bytes in a row."""


class TokenPieces(dict[int, bytes]):
    """Bytes by token id. An entry is made when its token first comes, so a large vocabulary costs nothing at the start.

    Special tokens stand for no bytes. Nor do ids without a token: models pad their vocabulary.
    """

    def __init__(self, library: LibraryTokenizer) -> None:
        super().__init__()
        self._library = library
        self._spell, self.leading_spaces = _spelling(library.decoder)
        added = library.get_added_tokens_decoder()
        self.special = frozenset(token for token, content in added.items() if content.special)
        self.update(dict.fromkeys(self.special, b""))
        self._showing: dict[frozenset[int], Mapping[int, bytes]] = {frozenset(): self}

    def __missing__(self, token: int) -> bytes:
        piece = self[token] = self._spelled(token)
        return piece

    def showing(self, tokens: frozenset[int]) -> Mapping[int, bytes]:
        """The same table, but with the bytes of these special tokens."""
        if (shown := tokens & self.special) not in self._showing:
            self._showing[shown] = ShownPieces(self, {token: self._spelled(token) for token in shown})
        return self._showing[shown]

    def _spelled(self, token: int) -> bytes:
        content = self._library.id_to_token(token)
        return b"" if content is None else self._spell(content)

    def name_of(self, token: int) -> str:
        """A token as shown by itself: its text, or the name of a special token, which has no text."""
        return self[token].decode("utf-8", "replace") or self._library.id_to_token(token) or ""


class ShownPieces(dict[int, bytes]):
    """Pieces in which special tokens have bytes."""

    def __init__(self, pieces: TokenPieces, shown: Mapping[int, bytes]) -> None:
        super().__init__(shown)
        self._pieces = pieces

    def __missing__(self, token: int) -> bytes:
        return self._pieces[token]


def _spelling(decoder: Decoder | None) -> tuple[Spell, int]:
    """How a token is spelled, and how many spaces the decoder drops at the beginning of a text."""
    if decoder is None:
        return (lambda token: b" " + token.encode()), 1
    state = json.loads(decoder.__getstate__())
    if state["type"] == "ByteLevel":
        return _spell_byte_level, 0
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return _sentencepiece_spelling(steps)


def _spell_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL_ALPHABET[character] for character in token])
    except KeyError:  # a token added by hand is not spelled in this alphabet
        return token.encode()


def _sentencepiece_spelling(steps: list[dict[str, Any]]) -> tuple[Spell, int]:
    replacements: list[tuple[str, str]] = []
    has_byte_tokens = False
    leading_spaces = 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                replacements.append((pattern, content))
            case {"type": "ByteFallback"}:
                has_byte_tokens = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                leading_spaces = start
            case _:
                raise UnknownDecoderError(json.dumps(step, ensure_ascii=False))

    def spell(token: str) -> bytes:
        if has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        return token.encode()

    return spell, leading_spaces


def _byte_level_alphabet() -> dict[str, int]:
    """A visible byte of Latin-1 is written as itself. The other bytes are written as characters from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


# ── detokenizer ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Detokenizer:
    """The text of one sequence, piece by piece. All pieces, then `finish()`, are the text of its tokens.

    Bytes that may still become a character are held back. Bytes that cannot become one are U+FFFD at once.
    """

    def __init__(self, pieces: TokenPieces, is_continuation: bool = False, shown: frozenset[int] = frozenset()) -> None:
        """`is_continuation`: the text follows other text, so it keeps a space at its beginning.

        `shown`: special tokens that have a text all the same.
        """
        self._pieces = pieces.showing(shown)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._leading_spaces = 0 if is_continuation else pieces.leading_spaces

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete."""
        pieces = self._pieces
        return self._trim(self._decoder.decode(b"".join([pieces[token] for token in tokens])))

    def finish(self) -> str:
        """The text that was held back: U+FFFD where the tokens end inside a character."""
        return self._trim(self._decoder.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        while self._leading_spaces and text:
            if text[0] == " ":
                self._leading_spaces -= 1
                text = text[1:]
            else:
                self._leading_spaces = 0
        return text
