"""HTTP routes set, show and end the traffic route of a name; a server may start with some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Request
from pydantic import Field

from rota.core.adapter import Adapter, listed
from rota.core.errors import ConfigError, Fault, FaultCode, RequestError
from rota.runtime.registry import Registry
from rota.server.access.access import MOST_REPEATED
from rota.server.access.audit import audited
from rota.server.access.disclosure import reason_for
from rota.server.access.keys import Key
from rota.server.adapters.manager import AdapterManager
from rota.server.calls.fields import Fields, read_body
from rota.server.context import AppContext
from rota.server.traffic.route import MOST_TARGETS, RolledBack, Route, TrafficSplit, check_weights
from rota.server.traffic.traffic import Traffic

# ── fields ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# The body that sets a traffic route, and the body that shows one.

Weight = Annotated[float, Field(json_schema_extra={"minimum": 0.0, "maximum": 1.0})]


class RouteFields(Fields):
    """Where the requests of a name go. Weights sum to 1.

    A target is `name@version`, or a name, which means that name's current version. `rollback` takes all requests if
    another target fails; left out, it is the target with the largest weight. `shadow` gets copies whose answers are
    dropped.
    """

    targets: dict[str, Weight] = Field(json_schema_extra={"minProperties": 1, "maxProperties": MOST_TARGETS})
    rollback: str | None = None
    shadow: str | None = None

    def route(self, name: str) -> Route:
        """Raises RequestError for weights that do not sum, and for a shadow that is a target too."""
        check_weights(self.targets)
        if self.shadow is not None and self.shadow in self.targets:
            message = (
                f"shadow: '{self.shadow[:MOST_REPEATED]}' is one of the targets, so it answers such requests already."
            )
            raise RequestError.bad_field("shadow", message)
        heaviest = max(self.targets, key=lambda target: self.targets[target])
        return Route(
            name=name, split=TrafficSplit(self.targets), rollback=self.rollback or heaviest, shadow=self.shadow
        )

    @property
    def written(self) -> str:
        """The targets for a log."""
        return ", ".join(f"{target} {weight:g}" for target, weight in list(self.targets.items())[:MOST_TARGETS])

    @property
    def places(self) -> list[tuple[str, str]]:
        """Each name in the body, with its place."""
        others = {"rollback": self.rollback, "shadow": self.shadow}
        named = [(place, name) for place, name in others.items() if name is not None]
        return [*((f"targets.{target[:MOST_REPEATED]}", target) for target in self.targets), *named]


@dataclass(frozen=True, slots=True)
class RouteBody:
    """Where the requests of a name go, and how many went there since the route was set."""

    name: str
    targets: Mapping[str, float]
    rollback: str
    shadow: str | None
    shadow_ended: str | None
    rolled_back: RolledBack | None
    requests: dict[str, int]


@dataclass(frozen=True, slots=True)
class RoutesBody:
    """All traffic routes that a key may see."""

    data: list[RouteBody]


def seen(key: Key, route: Route) -> RouteBody:
    """A reason may name a folder."""
    back, ended = route.rolled_back, route.shadow_ended
    return RouteBody(
        route.name,
        route.weights,
        route.rollback,
        route.shadow,
        reason_for(key, ended) if ended else None,
        back and replace(back, reason=reason_for(key, back.reason)),
        route.requests,
    )


# ── first routes ────────────────────────────────────────────────────────────────────────────────────────────────────
# First routes are the traffic routes that a server starts with: routes that are set by calls end with the server.

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


# ── routes ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# HTTP routes set, show and end the traffic route of a name.
#
# A key that may load a name may say and see where its requests go: a target may be another key's adapter.


async def set_route(context: AppContext, name: str, http: Request) -> RouteBody:
    """Send the requests of a name to several versions or adapters, by weight."""
    fields = read_body(RouteFields, await http.body())
    access, key = context.access, context.access.key_of(http)
    with audited(http, key, "route", adapter=name, targets=fields.written, shadow=fields.shadow):
        access.loader_of(http, name)
        _loaded(context.registry, name)
        route = fields.route(name)
        for place, target in fields.places:
            _refuse_leaving(context.adapters, access.find(key, target, place), place)
        route.set_by = None if key.may_operate else key.name
        context.traffic.set(route)
    return seen(key, route)


async def show_route(context: AppContext, name: str, http: Request) -> RouteBody:
    """Where the requests of a name go, and why, if the route was rolled back."""
    key = context.access.loader_of(http, name)
    return seen(key, _set(context.traffic, name))


async def show_routes(context: AppContext, http: Request) -> RoutesBody:
    """All traffic routes of the names that the key may load."""
    key = context.access.key_of(http)
    return RoutesBody([seen(key, one) for one in context.traffic.routes if context.access.may_change(key, one.name)])


async def end_route(context: AppContext, name: str, http: Request) -> RouteBody:
    """Roll back: the name means one version again, the one that its route rolls back to."""
    access, registry, traffic = context.access, context.registry, context.traffic
    key = access.key_of(http)
    with audited(http, key, "end_route", adapter=name):
        access.loader_of(http, name)
        route = _set(traffic, name)
        ended = seen(key, route)
        traffic.roll_back(route)  # before the name means the version: an update of the name may be under way
        target = registry.get(route.rollback)
        if target and target.name == name and not registry.has(target):
            await context.adapters.use(target, check=lambda: access.loader_of(http, name))
        if traffic.route_of(name) is route:  # else another was set, or the name was unloaded
            traffic.end(name)
    return ended


def _loaded(registry: Registry, name: str) -> None:
    if registry.loaded(name) is None:
        message = f"No adapter named '{name[:200]}' is loaded; a route is set for a name that is."
        raise RequestError(Fault(FaultCode.UNKNOWN_MODEL, message, "name"))


def _refuse_leaving(adapters: AdapterManager, target: Adapter, place: str) -> None:
    if adapters.is_leaving(target):
        message = f"{place}: version {target.version} of '{target.name}' is leaving; load it again."
        raise RequestError(Fault(FaultCode.UNKNOWN_MODEL, message, place))


def _set(traffic: Traffic, name: str) -> Route:
    if (route := traffic.route_of(name)) is None:
        message = f"No route is set for '{name[:200]}': its requests go to its current version."
        raise RequestError(Fault(FaultCode.UNKNOWN_MODEL, message, "name"))
    return route
