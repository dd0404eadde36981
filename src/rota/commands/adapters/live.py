"""`rota adapters list`, `load`, `update` and `unload` are about the adapters of a running server."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import typer

from rota.commands.adapters.live_server import ApiKey, BaseUrl, LiveServer, Name
from rota.commands.server_call import DEFAULT_URL
from rota.core.errors import ConfigError

Folder = Annotated[
    str, typer.Argument(metavar="PATH", help="The adapter's folder, as the server finds it, or another source.")
]


def listed(base_url: BaseUrl = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """List the adapters of a running server, their versions, and where their requests go."""
    # Imported here, so that `rota --help` does not wait for tables.
    from rota.commands.adapters.live_server import print_adapters, print_routes

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


# ── route ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# `rota adapters route` shows or says where the requests of a name go.

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TARGET=WEIGHT",
        help="A version (NAME@VERSION) or another adapter, and its share of the requests; all shares sum to 1. Left "
        "out: the route is shown.",
    ),
]


def route(
    name: Name,
    targets: Targets = None,
    shadow: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Gets copies of the requests; its answers are dropped.")
    ] = None,
    rollback: Annotated[
        str | None,
        typer.Option(metavar="TARGET", help="Gets all requests if another target fails; left out: the heaviest."),
    ] = None,
    end: Annotated[
        bool, typer.Option("--end", help="Roll back: the name means one version again, that of the roll-back.")
    ] = False,
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Show where the requests of a name go on a running server, or send them to several targets by weight."""
    # Imported here, so that `rota --help` does not wait for tables.
    from rota.commands.adapters.live_server import print_routes

    server = LiveServer(base_url, api_key)
    options = {key: value for key, value in {"shadow": shadow, "rollback": rollback}.items() if value is not None}
    if end:
        _refuse_beside_end([*(targets or []), *options])
        ended = server.route(name, method="DELETE")
        print(f"The route of '{name}' has ended: its requests go to '{ended['rollback']}'.")
        return
    if targets:
        print_routes([server.route(name, {"targets": weights_in(targets), **options}, "PUT")])
    elif options:
        raise ConfigError(f"--{next(iter(options))} needs targets beside it, as in {name}@1=0.9 {name}@2=0.1.")
    else:
        print_routes([server.route(name)])


def weights_in(targets: Sequence[str]) -> dict[str, float]:
    """What was typed as TARGET=WEIGHT. Raises ConfigError."""
    weights: dict[str, float] = {}
    for typed in targets:
        target, _, weight = typed.rpartition("=")
        try:
            share = float(weight)
        except ValueError:
            share = -1.0
        if not target or share < 0.0:
            raise ConfigError(f"'{typed}' is no target with a weight; write one as legal@7=0.95.")
        if target in weights:
            raise ConfigError(f"'{target}' is named twice.")
        weights[target] = share
    return weights


def _refuse_beside_end(others: Sequence[str]) -> None:
    if others:
        raise ConfigError("--end ends the route, so nothing else is said beside it.")


# ── quarantine ──────────────────────────────────────────────────────────────────────────────────────────────────────
# `rota adapters quarantine` shows the adapters that engines died of, and lets an operator lift that.


def quarantine(
    lift: Annotated[
        str | None, typer.Option(metavar="NAME", help="This adapter may be loaded again; load it then.")
    ] = None,
    give_back: Annotated[
        str | None, typer.Option(metavar="KEY", help="This key, by its name, may load adapters again.")
    ] = None,
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """List the quarantined adapters of a running server, and the keys that may load nothing for that."""
    server = LiveServer(base_url, api_key)
    if lift is not None:
        server.end_quarantine("adapters", lift)
        print(f"Adapter '{lift}' may be loaded again.")
    if give_back is not None:
        server.end_quarantine("keys", give_back)
        print(f"Key '{give_back}' may load adapters again.")
    if lift is not None or give_back is not None:
        return
    found = server.quarantine()
    for one in found["adapters"]:
        since = datetime.fromtimestamp(one["since"]).astimezone().isoformat(" ", "seconds")
        print(f"{one['name']} (key: {one['key'] or 'operator'}), since {since}: {one['reason']}")
    for key in found["keys"]:
        print(f"Key '{key}' may load nothing.")
    if not found["adapters"] and not found["keys"]:
        print("No adapter is quarantined.")
