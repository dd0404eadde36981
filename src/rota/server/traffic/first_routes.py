"""First routes are the traffic routes that a server starts with: routes that are set by calls end with the server."""

from __future__ import annotations

from collections.abc import Sequence

from rota.core.adapter import listed
from rota.core.errors import ConfigError, RequestError
from rota.runtime.registry import Registry
from rota.server.fields import read_body
from rota.server.traffic.fields import RouteFields
from rota.server.traffic.route import Route

FORM = "give NAME=JSON, with the JSON of PUT /v1/adapters/NAME/route"


def first_routes(entries: Sequence[str], registry: Registry) -> list[Route]:
    """The entries of --lora-routes. Raises ConfigError, also for adapters that the server does not start with."""
    routes = [_route(entry, registry) for entry in entries]
    names = [route.name for route in routes]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"lora_routes has two routes for '{name}'; a name has one.")
    return routes


def _route(entry: str, registry: Registry) -> Route:
    name, equals, body = entry.partition("=")
    if not equals:
        raise ConfigError(f"lora_routes: '{entry}' is no route; {FORM}.")
    _refuse_unknown(registry, name)
    try:
        fields = read_body(RouteFields, body.encode())
        route = fields.route(name)
    except RequestError as error:
        raise ConfigError(f"lora_routes: the route of '{name}' cannot be: {error.fault.message}") from None
    for _, target in fields.places:
        if registry.get(target) is None:
            _refuse_unknown(registry, target)
    return route


def _refuse_unknown(registry: Registry, name: str) -> None:
    if registry.loaded(name) is None:
        known = listed(sorted(one.name for one in registry.adapters))
        raise ConfigError(f"lora_routes: '{name}' is none of the adapters to start with; they are: {known}.")
