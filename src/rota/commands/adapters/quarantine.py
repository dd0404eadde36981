"""`rota adapters quarantine` shows the adapters that engines died of, and lets an operator lift that."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from rota.commands.adapters.live_server import ApiKey, BaseUrl, LiveServer
from rota.commands.chat.config import DEFAULT_URL


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
