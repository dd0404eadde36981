"""A report runs sections of targets, prints which hold, and writes a page and its figures."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from .target import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A program of sections; `page` has no ending, because the figures lie beside the page."""

    title: str
    command: str
    date: str
    machine: str
    explained_in: str
    page: Path
    sections: Mapping[str, Callable[[], Section]]

    def main(self, description: str | None) -> None:
        parser = argparse.ArgumentParser(description=description)
        names = [*self.sections]
        parser.add_argument("--only", nargs="+", choices=names, default=names, help="run only these")
        parser.add_argument("--output", type=Path, help=f"write {self.page}.md and .json into this folder")
        options = parser.parse_args()
        sections, took_s = [], {}
        for name in tqdm(options.only, unit="section", disable=None):
            started_at = time.perf_counter()
            sections.append(self.sections[name]())
            took_s[name] = round(time.perf_counter() - started_at, 1)
        _print_targets(sections)
        if options.output:
            self._write(sections, took_s, options.output)

    def _write(self, sections: list[Section], took_s: dict[str, float], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        found = {"command": self.command, "date": self.date, "machine": self.machine, "took_s": took_s}
        content = {**found, "sections": [section.as_dict() for section in sections]}
        figures = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        (folder / self.page).with_suffix(".json").write_text(figures)
        origin = f"`{self.command}`, {self.date}, {self.machine}."
        parts = [
            f"# {self.title}",
            f"{origin} Times are simulated; what each target means is in {self.explained_in}.",
            *(section.as_markdown() for section in sections),
        ]
        (folder / self.page).with_suffix(".md").write_text("\n\n".join(parts) + "\n")


def _print_targets(sections: list[Section]) -> None:
    table = Table(box=None, pad_edge=False)
    for head in ("target", "wanted", "measured", "held"):
        table.add_column(head)
    for section in sections:
        table.add_row(section.title, style="bold")
        for one in section.targets:
            table.add_row(f"  {one.what}", one.wanted, one.measured, "yes" if one.is_held else "no")
    Console(width=180, highlight=False).print(table)
