"""Models that think before they answer mark where their thoughts begin and end."""

from __future__ import annotations

from dataclasses import dataclass

from rota.text.markers import Markers

_BLANKS = " \t\n\r"


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """Texts between which a family of models thinks."""

    starts: Markers
    ends: Markers


_THINK = ThinkingMarks(Markers("<think>"), Markers("</think>"))

# By the name of their parser. The names of models are those that vLLM's and SGLang's operators know.
MARKS = {
    "think": _THINK,
    "qwen3": _THINK,
    "deepseek_r1": _THINK,
    "mistral": ThinkingMarks(Markers("[THINK]"), Markers("[/THINK]")),
    "granite": ThinkingMarks(
        Markers("Here is my thought process:", "Here's my thought process:"),
        Markers("Here is my response:", "Here's my response:"),
    ),
}


def marks_in(template: str) -> str:
    """The parser whose marks a chat template writes or looks for; empty if there is none."""
    for name in ("think", "mistral", "granite"):
        if any(mark in template for mark in (*MARKS[name].starts.texts, *MARKS[name].ends.texts)):
            return name
    return ""


class ThinkingParser:
    """Splits the text of one answer into thoughts and the answer itself.

    An answer without thoughts is left as it is. Blanks beside the marks belong to the marks.
    """

    def __init__(self, marks: ThinkingMarks, is_open: bool) -> None:
        """`is_open`: the prompt already ends with the first mark."""
        self._marks = marks
        self._text = ""  # held back
        self._state = "inside" if is_open else "before"
        self._has_spoken = False

    @property
    def is_over(self) -> bool:
        """Whether all text that follows is the answer's."""
        return self._state == "over"

    def push(self, text: str) -> tuple[str, str]:
        """New text of the thoughts, and of the answer."""
        self._text += text
        if self._state == "before":
            self._look_for_start()
        reasoning = self._thoughts() if self._state == "inside" else ""
        if self._state == "behind" and (rest := self._text.lstrip(_BLANKS)):
            self._text, self._state = rest, "over"
        return reasoning, self._taken() if self._state == "over" else ""

    def finish(self) -> tuple[str, str]:
        """What was held back. No more text comes."""
        match self._state:
            case "inside":
                return self._taken(), ""
            case "behind":
                return "", ""
        return "", self._taken()

    def _look_for_start(self) -> None:
        text = self._text
        at = len(text) - len(text.lstrip(_BLANKS))
        if length := self._marks.starts.at(text, at):
            self._text, self._state = text[at + length :], "inside"
        elif at < len(text) and not self._marks.starts.may_begin(text, at):
            self._state = "over"

    def _thoughts(self) -> str:
        text = self._text if self._has_spoken else self._text.lstrip(_BLANKS)
        if found := self._marks.ends.find(text, 0):
            self._text, self._state = text[found[1] :], "behind"
            return text[: found[0]].rstrip(_BLANKS)
        safe = len(text[: len(text) - self._marks.ends.held(text, 0)].rstrip(_BLANKS))
        self._text = text[safe:]
        self._has_spoken = self._has_spoken or safe > 0
        return text[:safe]

    def _taken(self) -> str:
        text, self._text = self._text, ""
        return text
