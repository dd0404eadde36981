"""A target is a number that was asked for, the number that was measured, and whether the one meets the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rota.observe.table import seconds


@dataclass(frozen=True, slots=True)
class Target:
    what: str
    wanted: str
    measured: str
    is_held: bool


@dataclass(slots=True)
class Section:
    """Targets that were measured together, and tables that show how they came about."""

    title: str
    command: str
    targets: list[Target] = field(default_factory=list)
    tables: list[tuple[str, list[str], list[list[str]]]] = field(default_factory=list)

    def at_most(self, what: str, value: float, limit: float) -> None:
        """A duration in seconds."""
        self.targets.append(Target(what, f"≤ {seconds(limit)}", seconds(value), value <= limit))

    def times_at_most(self, what: str, value: float, base: float, limit: float) -> None:
        self.targets.append(Target(what, f"≤ {limit:.3g} ×", f"{value / base:.2f} ×", value <= limit * base))

    def times_at_least(self, what: str, value: float, base: float, limit: float) -> None:
        self.targets.append(Target(what, f"≥ {limit:.3g} ×", f"{value / base:.2f} ×", value >= limit * base))

    def add_table(self, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.tables.append((title, [*heads], [[*row] for row in rows]))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_markdown(self) -> str:
        parts = [f"## {self.title}", f"`{self.command}`"]
        for title, heads, rows in self.tables:
            parts += [*([f"**{title}**"] if title else []), _markdown(heads, rows)]
        rows = [[one.what, one.wanted, one.measured, "yes" if one.is_held else "**no**"] for one in self.targets]
        parts.append(_markdown(["target", "wanted", "measured", "held"], rows))
        return "\n\n".join(parts)


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
