"""A byte-level vocabulary as large as Llama 3's that spells JSON: bytes, JSON's marks, numbers, and made-up words."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 128_256
SPECIAL = 256  # as many as Llama 3 keeps; the first of them ends an answer
END = VOCABULARY - SPECIAL
# A byte-level tokenizer writes a blank and a line's end as these letters.
BLANK, LINE = "Ġ", "Ċ"

_MARKS = (
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    '{"',
    '"}',
    '":',
    '",',
    '["',
    '"]',
    "},",
    "],",
    ":{",
    ":[",
    "[{",
    "}]",
    '":"',
)
# Syllables are one of each.
_BEGINNINGS = (
    "b",
    "c",
    "ch",
    "d",
    "f",
    "g",
    "h",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pr",
    "qu",
    "r",
    "s",
    "st",
    "t",
    "v",
    "w",
    "z",
)
_MIDDLES = ("a", "e", "i", "o", "u", "ai", "ea", "ie", "oo", "ou")
_ENDS = ("", "b", "ck", "d", "l", "ll", "m", "n", "nd", "ng", "nt", "p", "r", "rs", "s", "st", "t", "x")


def write_json_tokenizer(folder: Path) -> None:
    """Make a model's folder one that text and grammars can read."""
    # Some words come twice; there would be millions.
    words = list(dict.fromkeys(itertools.islice(_tokens(), 2 * END)))[:END]
    assert len(words) == END
    special = [f"<special {number}>" for number in range(SPECIAL)]
    library = Tokenizer(models.BPE({word: number for number, word in enumerate(words + special)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(special)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": special[0]}))


def _tokens() -> Iterator[str]:
    yield from sorted(pre_tokenizers.ByteLevel.alphabet())
    for mark in _MARKS:
        yield from (mark, BLANK + mark, mark + BLANK, mark + LINE)
    yield from (letter * count for letter in (BLANK, LINE) for count in range(2, 33))
    yield from map(str, range(10, 1000))
    yield from ("true", "false", "null")
    syllables = ["".join(parts) for parts in itertools.product(_BEGINNINGS, _MIDDLES, _ENDS)]
    for word in itertools.chain(syllables, map("".join, itertools.product(syllables, syllables))):
        yield from (word, BLANK + word, word.capitalize())
