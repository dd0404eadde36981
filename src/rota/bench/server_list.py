"""A server lists what it serves: the base model and its adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp

from rota.bench.client import Server, message_of
from rota.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerList:
    """The base model's name, and the path of every adapter by name, in the server's order."""

    base: str
    paths: dict[str, str]

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self.paths)

    def path_of(self, adapter: str) -> str:
        if adapter not in self.paths:
            raise ConfigError(f"The server does not list {adapter}, so a transient cannot be loaded from its folder.")
        return self.paths[adapter]


async def list_models(server: Server, base: str | None) -> ServerList:
    """Read /v1/models. Raises ConfigError if there is no usable answer."""
    try:
        async with server.session.get(f"{server.url}/v1/models") as response:
            text = await response.text()
            if response.status != 200:
                raise ConfigError(f"{server.url}/v1/models answers {response.status}: {message_of(text)}")
            entries: list[dict[str, Any]] = (await response.json())["data"]
    except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
        raise ConfigError(f"There is no answer at {server.url}/v1/models: {error}.") from error
    names = [entry["id"] for entry in entries if not entry.get("parent")]
    if base is None and not names:
        raise ConfigError(f"{server.url} lists no base model; name one with --model.")
    paths = {entry["id"]: str(entry.get("root") or "") for entry in entries if entry.get("parent")}
    return ServerList(base or names[0], paths)
