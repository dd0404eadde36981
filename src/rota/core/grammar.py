"""A grammar says what an answer must look like; a matcher says which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match, in the form of the grammar library. It is checked where the request is made."""

    text: str
    # The client's field that asked for it, which an error names.
    param: str = field(default="response_format", compare=False)


class Matcher(Protocol):
    """Where one answer stands in its grammar."""

    def accept(self, tokens: Sequence[int]) -> None:
        """The answer goes on with these tokens. Tokens behind its end change nothing."""
        ...

    @property
    def fault(self) -> str:
        """Why no token can follow, though the answer is not complete; empty if all is well."""
        ...


class Grammars(Protocol):
    """Makes matchers for one vocabulary, from any thread."""

    def matcher(self, grammar: Grammar) -> Matcher:
        """At the beginning of an answer. A grammar that was never seen takes milliseconds."""
        ...

    def fill(self, wanted: Sequence[tuple[Matcher, int]], masks: memoryview) -> None:
        """Write each matcher's mask into its line of `masks`, [lines, words] of 32 bits: a bit a token, lowest first.

        A matcher at its end, or with a fault, allows every token: its answer ends, and the token is not read.
        """
        ...
