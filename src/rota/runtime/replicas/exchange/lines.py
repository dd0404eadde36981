"""Lines of whole numbers in shared memory, each with one writer: a reader gets a whole line, or knows that it is torn.

Python has no memory barriers, and a processor may see the stores of another in any order. So every number stands in a
word of eight bytes beside the number of its write, and processors move such a word at once. A line is whole if all its
words are of the same write:

    | number 7, write 42 | number 0, write 42 | number 3, write 41 |      torn: the last word is still the old one
"""

from __future__ import annotations

import mmap
from pathlib import Path
from struct import Struct

WORD_BYTES = 8
MOST = 2**32 - 1  # the largest number, and the largest number of a write


class SharedLines:
    """A file of lines, each of the same number of words, mapped by every process that reads or writes one."""

    def __init__(self, path: Path, words: int) -> None:
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)
        self.line_bytes = words * WORD_BYTES
        self.count = len(self.memory) // self.line_bytes
        self.pairs = Struct(f"@{2 * words}I")  # number, write, number, write …
        self._words = words

    @staticmethod
    def create(path: Path, lines: int, words: int) -> None:
        """A file in which no line was ever written."""
        path.write_bytes(bytes(lines * words * WORD_BYTES))

    def write(self, line: int, write: int, numbers: list[int]) -> None:
        """Only the line's writer may call this. `write` is above 0, and another than that of the line before."""
        pairs = [write] * (2 * self._words)
        pairs[::2] = numbers
        # Packed elsewhere first: to pack into a buffer fills the buffer with zeros before.
        start = line * self.line_bytes
        self.memory[start : start + self.line_bytes] = self.pairs.pack(*pairs)

    def read(self, line: int) -> tuple[int, tuple[int, ...]] | None:
        """The number of the last write and what was written; None if the line is torn, or was never written."""
        pairs = self._copy(line)
        write = pairs[1]
        return (write, pairs[::2]) if write and pairs[1::2].count(write) == self._words else None

    def newest_write(self, line: int) -> int:
        """The largest number of a write among the words of a line, torn or not."""
        return int(max(self._copy(line)[1::2]))

    def _copy(self, line: int) -> tuple[int, ...]:
        # Copied first, because to unpack reads the halves of a word one by one.
        start = line * self.line_bytes
        return self.pairs.unpack(self.memory[start : start + self.line_bytes])

    def close(self) -> None:
        self.memory.close()
