"""`rota adapters` looks at a folder, and lists and changes the adapters of a running server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from rota.commands.adapters.inspect import inspect
from rota.commands.server_call import DEFAULT_URL, KEY_HELP, KEY_VARIABLE, ask
from rota.core.errors import ConfigError
from rota.observe.table import by_number

# A large adapter is read from a slow disk or from far away.
LOAD_S = 900.0

Name = Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name.")]
BaseUrl = Annotated[str, typer.Option(metavar="URL", help="The server's address.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        envvar=KEY_VARIABLE,
        show_envvar=False,
        help=KEY_HELP,
    ),
]
Folder = Annotated[
    str, typer.Argument(metavar="PATH", help="The adapter's folder, as the server finds it, or another source.")
]


def listed(
    as_json: Annotated[bool, typer.Option("--json", help="Print what the server answers, as JSON.")] = False,
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """List the adapters of a running server, their versions, and where their requests go."""
    adapters, routes = (ask(base_url, api_key, f"/v1/{what}")["data"] for what in ("adapters", "routes"))
    if as_json:
        print(json.dumps({"adapters": adapters, "routes": routes}, indent=1))
        return
    print_adapters(adapters)
    print_routes(routes)


def load(
    name: Name,
    path: Folder,
    pinned: Annotated[bool, typer.Option("--pinned", help="The adapter never leaves its slot.")] = False,
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Load an adapter into a running server. Ends when requests may name it."""
    # This route refuses a name that is loaded already.
    body = {"lora_name": name, "lora_path": path, "pinned": pinned}
    ask(base_url, api_key, "/load_lora_adapter", body, LOAD_S)
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
    made = ask(base_url, api_key, f"/v1/adapters/{quote(name)}", body, LOAD_S, "PUT")
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
    gone = ask(base_url, api_key, f"/v1/adapters/{quote(name)}", None, LOAD_S, "DELETE")
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
    at = base_url, api_key, f"/v1/adapters/{quote(name)}/route"
    options = {key: value for key, value in {"shadow": shadow, "rollback": rollback}.items() if value is not None}
    if end:
        _refuse_beside_end([*(targets or []), *options])
        ended = ask(*at, method="DELETE")
        print(f"The route of '{name}' has ended: its requests go to '{ended['rollback']}'.")
        return
    if targets:
        print_routes([ask(*at, {"targets": weights_in(targets), **options}, method="PUT")])
    elif options:
        raise ConfigError(f"--{next(iter(options))} needs targets beside it, as in {name}@1=0.9 {name}@2=0.1.")
    else:
        print_routes([ask(*at)])


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
    at = "/v1/quarantine"
    if lift is not None:
        ask(base_url, api_key, f"{at}/adapters/{quote(lift)}", method="DELETE")
        print(f"Adapter '{lift}' may be loaded again.")
    if give_back is not None:
        ask(base_url, api_key, f"{at}/keys/{quote(give_back)}", method="DELETE")
        print(f"Key '{give_back}' may load adapters again.")
    if lift is not None or give_back is not None:
        return
    found = ask(base_url, api_key, at)
    for one in found["adapters"]:
        since = datetime.fromtimestamp(one["since"]).astimezone().isoformat(" ", "seconds")
        print(f"{one['name']} (key: {one['key'] or 'operator'}), since {since}: {one['reason']}")
    for key in found["keys"]:
        print(f"Key '{key}' may load nothing.")
    if not found["adapters"] and not found["keys"]:
        print("No adapter is quarantined.")


def adapters_app() -> typer.Typer:
    app = typer.Typer(
        help="Look at adapters before you serve them, and change those of a running server.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.command(name="inspect")(inspect)
    app.command(name="list")(listed)
    app.command(name="load")(load)
    app.command(name="update")(update)
    app.command(name="unload")(unload)
    app.command(name="route")(route)
    app.command(name="quarantine")(quarantine)
    return app


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def print_adapters(adapters: Sequence[dict[str, Any]]) -> None:
    """A line for each version, the current one last."""
    if not adapters:
        print("No adapter is loaded that this key may use.")
        return
    table = Table("adapter", "version", "state", "memory", "path", box=box.SIMPLE, pad_edge=False)
    for adapter in sorted(adapters, key=lambda one: by_number(one["name"])):
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
