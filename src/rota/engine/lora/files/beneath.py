"""A path beneath a folder is walked step by step, and no step of the way may leave that folder."""

from __future__ import annotations

import os
from pathlib import Path

# As many links as Linux follows, and as long a path as it takes: a longer walk would only cost time.
MOST_LINKS, LONGEST_PATH = 40, 4096


def beneath(root: Path, path: str | Path) -> Path | None:
    """The path with links followed. None if a step leaves `root`, which has no link in it, or cannot be made.

    A path that leaves the folder and comes back is refused too. Else a client could learn what lies beside the folder:
    `../other/../mine` leads to another place if `other` is a link. Nothing outside the folder is looked at.
    """
    steps = _steps_from(root, str(path)) if len(str(path)) < LONGEST_PATH else None
    if steps is None:
        return None
    place, links = root, 0
    while steps:
        step = steps.pop()
        if step == "..":
            if place == root:
                return None
            place = place.parent
            continue
        target = _link_at(place / step)
        if target is None:
            place /= step
            if len(str(place)) >= LONGEST_PATH:
                return None
            continue
        links += 1
        further = _steps_from(root, target) if links <= MOST_LINKS else None
        if further is None:
            return None
        steps += further
        if os.path.isabs(target):
            place = root
    return place if _can_be_asked_for(place) else None


def _steps_from(root: Path, path: str) -> list[str] | None:
    """The names on the way, the last one first. An absolute path has to begin with the root."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if os.path.isabs(path):
        start = list(root.parts[1:])
        if parts[: len(start)] != start:
            return None
        parts = parts[len(start) :]
    return parts[::-1]


def _link_at(path: Path) -> str | None:
    """What a link says; None for everything else, also for what is not there."""
    try:
        return os.readlink(path)
    except (OSError, ValueError):
        return None


def _can_be_asked_for(path: Path) -> bool:
    """Whether the system takes the name at all: one may be too long, or hold a zero byte."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return True
