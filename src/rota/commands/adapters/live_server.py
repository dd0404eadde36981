"""A running server whose adapters are listed and changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from rota.commands.server_call import DEFAULT_URL, LOOK_S, CallError, call

# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# What a terminal shows of a server's adapters and of where their requests go.


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


# A large adapter is read from a slow disk or from far away.
LOAD_S = 900.0

Name = Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name.")]
BaseUrl = Annotated[str, typer.Option(metavar="URL", help="The server's address.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        envvar="ROTA_API_KEY",
        show_envvar=False,
        help="Sent as 'Authorization: Bearer KEY'; left out: the environment's ROTA_API_KEY.",
    ),
]


@dataclass(frozen=True, slots=True)
class LiveServer:
    """The adapters of a server. Every method raises CallError with the server's sentence."""

    url: str = DEFAULT_URL
    api_key: str | None = None

    def adapters(self) -> list[dict[str, Any]]:
        return self._listed("/v1/adapters")

    def routes(self) -> list[dict[str, Any]]:
        return self._listed("/v1/routes")

    def load(self, name: str, path: str, is_pinned: bool) -> None:
        """A name that is loaded already is refused."""
        self._ask("/load_lora_adapter", {"lora_name": name, "lora_path": path, "pinned": is_pinned}, timeout_s=LOAD_S)

    def update(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._ask(f"/v1/adapters/{quote(name)}", body, "PUT", LOAD_S)

    def unload(self, name: str) -> dict[str, Any]:
        """A name with all its versions, or one version."""
        return self._ask(f"/v1/adapters/{quote(name)}", None, "DELETE", LOAD_S)

    def route(self, name: str, body: dict[str, Any] | None = None, method: str = "GET") -> dict[str, Any]:
        return self._ask(f"/v1/adapters/{quote(name)}/route", body, method)

    def quarantine(self) -> dict[str, Any]:
        return self._ask("/v1/quarantine")

    def end_quarantine(self, kind: str, name: str) -> None:
        self._ask(f"/v1/quarantine/{kind}/{quote(name)}", None, "DELETE")

    def _listed(self, path: str) -> list[dict[str, Any]]:
        found = self._ask(path)["data"]
        return [dict(one) for one in found]

    def _ask(
        self, path: str, body: dict[str, Any] | None = None, method: str | None = None, timeout_s: float = LOOK_S
    ) -> dict[str, Any]:
        with call(self.url, self.api_key, path, body, timeout_s, method) as response:
            answer = response.read()
        try:
            return dict(json.loads(answer))
        except (ValueError, TypeError):
            raise CallError(f"What answers at {self.url} is no Rota server.") from None
