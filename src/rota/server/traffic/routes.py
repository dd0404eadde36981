"""HTTP routes set, show and end the traffic route of a name."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request

from rota.core.adapter import Adapter
from rota.core.errors import Fault, FaultCode, RequestError
from rota.runtime.registry import Registry
from rota.server.access.access import Access
from rota.server.access.disclosure import reason_for
from rota.server.access.keys import Key
from rota.server.adapters import AdapterManager
from rota.server.audit import audited
from rota.server.fields import read_body
from rota.server.openapi import gives, takes
from rota.server.traffic.fields import RouteBody, RouteFields, RoutesBody, shown
from rota.server.traffic.route import Route
from rota.server.traffic.traffic import Traffic

PATH = "/v1/adapters/{name:path}/route"


def install_traffic_routes(
    app: FastAPI, traffic: Traffic, adapters: AdapterManager, registry: Registry, access: Access
) -> None:
    """A key that may load a name may say and see where its requests go: a target may be another key's adapter."""
    traffic.tie(adapters)

    @app.put(PATH, openapi_extra=takes(RouteFields), responses=gives(RouteBody))
    async def set_route(name: str, http: Request) -> dict[str, Any]:
        """Send the requests of a name to several versions or adapters, by weight."""
        fields = read_body(RouteFields, await http.body())
        key = access.key_of(http)
        with audited(http, key, "route", adapter=name, targets=fields.written, shadow=fields.shadow):
            access.loader_of(http, name)
            _loaded(registry, name)
            route = fields.route(name)
            for place, target in fields.places:
                _refuse_leaving(adapters, access.find(key, target, place), place)
            route.set_by = None if key.may_operate else key.name
            traffic.set(route)
        return shown(route)

    @app.get(PATH, responses=gives(RouteBody))
    async def show_route(name: str, http: Request) -> dict[str, Any]:
        """Where the requests of a name go, and why, if the route was rolled back."""
        key = access.key_of(http)
        access.loader_of(http, name)
        return _seen(key, _set(traffic, name))

    @app.get("/v1/routes", responses=gives(RoutesBody))
    async def show_routes(http: Request) -> dict[str, Any]:
        """All traffic routes of the names that the key may load."""
        key = access.key_of(http)
        return {"data": [_seen(key, route) for route in traffic.routes if access.may_change(key, route.name)]}

    @app.delete(PATH, responses=gives(RouteBody))
    async def end_route(name: str, http: Request) -> dict[str, Any]:
        """Roll back: the name means one version again, the one that its route rolls back to."""
        key = access.key_of(http)
        with audited(http, key, "end_route", adapter=name):
            access.loader_of(http, name)
            route = _set(traffic, name)
            ended = _seen(key, route)
            traffic.roll_back(route)  # before the name means the version: an update of the name may be under way
            target = registry.get(route.rollback)
            if target and target.name == name and not registry.has(target):
                await adapters.use(target, check=lambda: access.loader_of(http, name))
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


def _seen(key: Key, route: Route) -> dict[str, Any]:
    """A reason may name a folder."""
    body = shown(route)
    if back := body["rolled_back"]:
        back["reason"] = reason_for(key, back["reason"])
    if body["shadow_ended"]:
        body["shadow_ended"] = reason_for(key, body["shadow_ended"])
    return body
