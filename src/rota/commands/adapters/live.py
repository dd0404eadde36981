"""`rota adapters list`, `load`, `update` and `unload` are about the adapters of a running server."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rota.commands.adapters.live_server import ApiKey, BaseUrl, LiveServer, Name
from rota.commands.chat.config import DEFAULT_URL
from rota.core.errors import ConfigError

Folder = Annotated[
    str, typer.Argument(metavar="PATH", help="The adapter's folder, as the server finds it, or another source.")
]


def listed(base_url: BaseUrl = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """List the adapters of a running server, their versions, and where their requests go."""
    # Imported here, so that `rota --help` does not wait for tables.
    from rota.commands.adapters.tables import print_adapters, print_routes

    server = LiveServer(base_url, api_key)
    print_adapters(server.adapters())
    print_routes(server.routes())


def load(
    name: Name,
    path: Folder,
    pinned: Annotated[bool, typer.Option("--pinned", help="The adapter never leaves its slot.")] = False,
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Load an adapter into a running server. Ends when requests may name it."""
    LiveServer(base_url, api_key).load(name, path, pinned)
    print(f"Adapter '{name}' is loaded.")


def update(
    name: Name,
    path: Annotated[str | None, typer.Argument(metavar="PATH", help="The folder of the new version.")] = None,
    version: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", help="In place of PATH: the name means this version, which is there."),
    ] = None,
    stage: Annotated[
        bool, typer.Option("--stage", help="The name means what it meant, and NAME@VERSION asks for the new version.")
    ] = False,
    switch: Annotated[
        bool, typer.Option("--switch", help="Answers that run go on under the new version from their next token on.")
    ] = False,
    keep_kv: Annotated[
        bool, typer.Option("--keep-kv", help="With --switch: their KV stays; left out: it is computed again.")
    ] = False,
    keep_old: Annotated[bool, typer.Option("--keep-old", help="The old version stays until it is unloaded.")] = False,
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Give an adapter of a running server a new version; without --switch, answers that run end under the old one."""
    if (path is None) == (version is None):
        raise ConfigError("Give either PATH, for a new version, or --version, for one that is there.")
    if stage and switch:
        raise ConfigError("--stage and --switch contradict each other: the name means the old version, or the new one.")
    what: dict[str, Any] = {"path": path} if version is None else {"version": version}
    asked = {"mode": "stage" if stage else "switch" if switch else None, "keep_old": keep_old or None}
    asked["kv"] = "keep" if keep_kv else None
    body = what | {field: value for field, value in asked.items() if value is not None}
    made = LiveServer(base_url, api_key).update(name, body)
    if made["version"] != made["current"]:
        print(f"Version {made['version']} of '{name}' is there: '{name}@{made['version']}' asks for it.")
    else:
        before = f", and meant version {made['previous']} before" if made["previous"] else ""
        print(f"'{name}' means version {made['current']}{before}.")


def unload(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name, or NAME@VERSION for one version.")],
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Unload an adapter of a running server, or one version of it. Its open requests end first."""
    gone = LiveServer(base_url, api_key).unload(name)
    later = "takes no new requests, and is unloaded when its last ones have ended"
    print(f"'{name}' {'is unloaded' if gone['is_gone'] else later}.")
