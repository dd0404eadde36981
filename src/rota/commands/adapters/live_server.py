"""A running server whose adapters are listed and changed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

import typer

from rota.commands.chat.config import DEFAULT_URL
from rota.commands.server_call import LOOK_S, CallError, call

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
