"""The commands under `rota adapters`."""

from __future__ import annotations

import typer

from rota.commands.adapters.inspect import inspect
from rota.commands.adapters.live import listed, load, quarantine, route, unload, update


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
