"""A trial is what the start of an engine has timed, and what it chose."""

from __future__ import annotations

from dataclasses import dataclass

# Numbers that say what was chosen; what they mean is known where it is timed.
Choice = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """Of two trials with one name the choice is the same."""

    name: str
    choice: Choice
