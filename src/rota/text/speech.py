"""Speech says how the text of an answer is sorted into content, reasoning and tool calls; a listener does it."""

from __future__ import annotations

from dataclasses import dataclass

from rota.text.said import Said


@dataclass(frozen=True, slots=True)
class Speech:
    """Which parsers read an answer. By default none: all text is content. Small: it travels between processes."""

    def listener(self) -> Listener:
        """For one answer, from its beginning."""
        return Listener()


class Listener:
    """Sorts the text of one answer as it comes. Text that may still become something else is held back."""

    def push(self, text: str) -> Said:
        return Said(text)

    def finish(self) -> Said:
        """What was held back. No more text comes."""
        return Said()
