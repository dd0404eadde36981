"""`rota adapters route` shows or says where the requests of a name go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from rota.commands.adapters.live_server import ApiKey, BaseUrl, LiveServer, Name
from rota.commands.chat.config import DEFAULT_URL
from rota.core.errors import ConfigError

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
    from rota.commands.adapters.tables import print_routes

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
