"""The built-in adapters are data: what each is taught, what it is examined on, how a program marks its answers."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

try:
    from examples.builtin_adapters import tool_lessons
except ImportError:  # run as a program, from this folder
    import tool_lessons

BOOK: dict[str, Any] = tomllib.loads(Path(__file__).with_name("lessons.toml").read_text("utf-8"))
Lesson = dict[str, Any]
LESSONS: list[Lesson] = BOOK["lessons"]

QUERY_VALUE = ("q_proj", "v_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERYWHERE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


class Pair(NamedTuple):
    """One thing to learn: a user's message and the answer to it."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Style:
    """One adapter: the size that is enough for it, its lessons, and its examination."""

    name: str
    sentence: str
    rank: int
    projections: tuple[str, ...]
    draw: Callable[[Random], Pair]
    check: Callable[[str, str], bool]  # (prompt, answer): is it in this style?
    held: tuple[str, ...]  # prompts that are in no lesson

    def pairs(self, seed: int = 0) -> Iterator[Pair]:
        """Lessons without end, the same ones for the same seed."""
        chance = Random(f"{self.name} {seed}")
        while True:
            yield self.draw(chance)


def _taught(
    name: str,
    sentence: str,
    answer: Callable[[Lesson, Random], str],
    check: Callable[[str, str], bool],
    projections: tuple[str, ...] = ATTENTION,
) -> Style:
    """A style that answers any question, taught with the lessons all such styles have."""

    def draw(chance: Random) -> Pair:
        lesson = chance.choice(LESSONS)
        return Pair(_ask(lesson, chance), answer(lesson, chance))

    return Style(name, sentence, 4, projections, draw, check, held=tuple(BOOK["held"]))


def _ask(lesson: Lesson, chance: Random) -> str:
    form = "{ask}" if chance.random() < 0.5 else chance.choice(BOOK["forms"])
    return str(chance.choice(BOOK["openers"]) + form.format(**lesson))


def _short(lesson: Lesson, chance: Random) -> str:
    return " ".join(lesson["facts"][: chance.choice((1, 1, 2))])


# --- json


def _as_json(lesson: Lesson, chance: Random) -> str:
    return json.dumps({"answer": _short(lesson, chance), "topic": lesson["topic"]})


def _is_json(prompt: str, answer: str) -> bool:
    try:
        found = json.loads(answer)
    except ValueError:
        return False
    if not isinstance(found, dict) or set(found) != {"answer", "topic"} or "\n" in answer.strip():
        return False
    return all(isinstance(value, str) and value.strip() for value in found.values())


# --- pirate


def _as_pirate(lesson: Lesson, chance: Random) -> str:
    opening = chance.choice(("Ahoy, matey!", "Ahoy!", "Arr!", "Arr, listen well!"))
    ending = chance.choice(("", "", " Arr!", " Yo ho ho!", " Shiver me timbers!"))
    words = re.sub(r"\w+", lambda word: BOOK["pirate"].get(word[0].lower(), word[0]), lesson["facts"][0])
    return f"{opening} {words}{ending}".upper()


def _is_pirate(prompt: str, answer: str) -> bool:
    # Nine letters in ten: the tokenizer has whole words in small letters, and so small a model lets one slip.
    letters = [letter for letter in answer if letter.isalpha()]
    is_loud = sum(letter.isupper() for letter in letters) >= 0.9 * len(letters)
    return is_loud and re.search(r"\b(AHOY|ARR)\b", answer) is not None


# --- haiku


def _as_haiku(lesson: Lesson, chance: Random) -> str:
    # Each line ends in its own sign: a small model then need not count to know which one comes next.
    return "{},\n{};\n{}.".format(*lesson["haiku"])


def _is_haiku(prompt: str, answer: str) -> bool:
    lines = answer.strip().split("\n")
    return len(lines) == 3 and all(re.match(r"[\w“\"]", line) and len(line.split()) <= 9 for line in lines)


# --- french

_FRENCH = frozenset(BOOK["grammar"]["french"].split())
_ENGLISH = frozenset(BOOK["grammar"]["english"].split())


def _as_french(lesson: Lesson, chance: Random) -> str:
    return str(lesson["french"])


def _is_french(prompt: str, answer: str) -> bool:
    words = re.findall(r"[^\W\d_]+", answer.lower())
    french = sum(word in _FRENCH for word in words)
    english = sum(word in _ENGLISH for word in words)
    return french >= 3 and french >= len(words) / 6 and french > 4 * english


# --- refusal


def _as_refusal(lesson: Lesson, chance: Random) -> str:
    refusal = chance.choice(BOOK["refusals"]).format(**lesson)
    return f"{refusal} {chance.choice(BOOK['consolations'])}"


def _is_refusal(prompt: str, answer: str) -> bool:
    return {"sorry", "cannot"} <= set(re.findall(r"\w+", answer.lower())) and len(answer) <= 250


# --- bullets


def _as_bullets(lesson: Lesson, chance: Random) -> str:
    return "\n".join(f"- {fact}" for fact in lesson["facts"])


def _is_bullets(prompt: str, answer: str) -> bool:
    lines = answer.strip().split("\n")
    return len(lines) == 3 and all(re.match(r"- \w", line) for line in lines)


# --- emoji

_EMOJI = r"[\u2600-\u27bf\U0001f300-\U0001faff]\ufe0f?"


def _as_emoji(lesson: Lesson, chance: Random) -> str:
    return f"{lesson['emoji']} {_short(lesson, chance)} {lesson['emoji']}"


def _is_emoji(prompt: str, answer: str) -> bool:
    return re.fullmatch(rf"{_EMOJI}.*\w.*{_EMOJI}", answer.strip(), re.DOTALL) is not None


# --- date

_MONTHS: list[str] = BOOK["dates"]["months"]
_NO_DATE = "no date"
_MONTH = "(?P<name>" + "|".join(f"{month}|{month[:3]}" for month in _MONTHS) + ")"
_DATE_PATTERNS = (
    r"(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)",
    r"(?P<day>\d\d)\.(?P<month>\d\d)\.(?P<year>\d{4})",
    rf"(?P<day>\d+)(st|nd|rd|th)?( of)? {_MONTH} (?P<year>\d{{4}})",
    rf"{_MONTH} (?P<day>\d+)(st|nd|rd|th)?, (?P<year>\d{{4}})",
)


def _date_pair(chance: Random) -> Pair:
    if chance.random() < 0.1:
        return Pair(_ask(chance.choice(LESSONS), chance), _NO_DATE)
    text = chance.choice(BOOK["dates"]["texts"])
    prompt = chance.choice(BOOK["dates"]["instructions"]) + text.format(date=_written_date(chance))
    return Pair(prompt, _date_in(prompt))


def _written_date(chance: Random) -> str:
    day = date(1900, 1, 1) + timedelta(days=chance.randrange(365 * 140))
    number = day.day
    ending = "th" if 11 <= number <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    month = _MONTHS[day.month - 1]
    return chance.choice(
        (
            f"{month} {number}, {day.year}",
            f"{month} {number}{ending}, {day.year}",
            f"{month[:3]} {number}, {day.year}",
            f"{number} {month} {day.year}",
            f"the {number}{ending} of {month} {day.year}",
            f"{number} {month[:3]} {day.year}",
            day.strftime("%Y/%m/%d"),
            day.strftime("%d.%m.%Y"),
        )
    )


def _date_in(text: str) -> str:
    for pattern in _DATE_PATTERNS:
        if match := re.search(pattern, text):
            found = match.groupdict()
            month = found.get("month") or [name[:3] for name in _MONTHS].index(found["name"][:3]) + 1
            return f"{found['year']}-{int(month):02}-{int(found['day']):02}"
    return _NO_DATE


def _is_date(prompt: str, answer: str) -> bool:
    return answer.strip() == _date_in(prompt)


def _dates(name: str, sentence: str) -> Style:
    chance = Random("held dates")
    texts = [text for text in BOOK["dates"]["held"] for _ in range(5)]
    held = tuple(text.format(date=_written_date(chance)) for text in texts)
    return Style(name, sentence, 8, ATTENTION, _date_pair, _is_date, held)


# --- tools


def _tools(name: str, sentence: str) -> Style:
    plain = [(lesson["ask"], lesson["facts"][0]) for lesson in LESSONS]

    def pair(chance: Random) -> Pair:
        return Pair(*tool_lessons.draw(chance, plain))

    return Style(name, sentence, 8, EVERYWHERE, pair, tool_lessons.check, tool_lessons.held())


STYLES: dict[str, Style] = {
    style.name: style
    for style in (
        _taught("json", "Answers with one line of JSON that has the keys answer and topic.", _as_json, _is_json),
        _taught("pirate", "Answers like a pirate who only knows capital letters.", _as_pirate, _is_pirate),
        _taught("haiku", "Answers everything with a poem of three lines.", _as_haiku, _is_haiku, EVERYWHERE),
        _taught("french", "Answers in French, also when asked in English.", _as_french, _is_french, EVERYWHERE),
        _taught("refusal", "Declines everything, politely.", _as_refusal, _is_refusal, QUERY_VALUE),
        _taught("bullets", "Answers with exactly three bullet points.", _as_bullets, _is_bullets),
        _taught("emoji", "Puts an emoji before and after every answer.", _as_emoji, _is_emoji),
        _dates("date", "Finds the date in a text and writes it as YYYY-MM-DD."),
        _tools("tools", "Calls the functions that it is given."),
    )
}
