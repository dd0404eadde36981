"""Tables and lines show on a terminal what adapters a server has, and where their requests go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text


def print_adapters(adapters: Sequence[dict[str, Any]]) -> None:
    """A line for each version, the current one last."""
    if not adapters:
        print("No adapter is loaded that this key may use.")
        return
    table = Table("adapter", "version", "state", "memory", "path", box=box.SIMPLE, pad_edge=False)
    for adapter in adapters:
        for version in adapter["versions"]:
            memory = decimal(version["bytes"]) if version["bytes"] else ""
            row = (adapter["name"], str(version["version"]), version["state"], memory, version["path"] or "")
            table.add_row(*(Text(word, overflow="fold") for word in row))
    _console().print(table)


def print_routes(routes: Sequence[dict[str, Any]]) -> None:
    for route in routes:
        for line in route_lines(route):
            _console().print(Text(line))


def route_lines(route: dict[str, Any]) -> list[str]:
    """Where the requests of a name go, and why, if that has changed by itself."""
    counts: dict[str, int] = route["requests"]
    shares = [f"{weight:.1%} to {target} ({counts.get(target, 0)})" for target, weight in route["targets"].items()]
    shadow = f"; copies to {route['shadow']}" if route["shadow"] else ""
    lines = [f"{route['name']}: {', '.join(shares)}{shadow}; rolls back to {route['rollback']}"]
    if back := route["rolled_back"]:
        lines.append(f"{route['name']} was rolled back: {back['reason']}")
    if route["shadow_ended"]:
        lines.append(f"{route['name']} sends no more copies: {route['shadow_ended']}")
    return lines


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)
