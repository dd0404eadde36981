"""Routes renew adapters, list their versions, and remove them one by one."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from rota.core.adapter import Adapter, listed, split_label
from rota.core.errors import Fault, FaultCode, RequestError
from rota.runtime.registry import Registry
from rota.server.access.access import Access
from rota.server.access.audit import audited
from rota.server.access.keys import Key
from rota.server.adapters.listing import Listing
from rota.server.adapters.updates import (
    AdapterBody,
    AdaptersListBody,
    RemovedBody,
    UpdatedBody,
    UpdateFields,
    Updates,
    read_query,
)
from rota.server.calls.fields import read_body
from rota.server.docs import gives, takes
from rota.server.long_lists import list_response

WEIGHTS_TYPES = ("application/octet-stream", "application/safetensors", "application/x-safetensors")


def install_version_routes(
    app: FastAPI, updates: Updates, registry: Registry, access: Access, listing: Listing
) -> None:
    _install_lists(app, access, listing)

    @app.put("/v1/adapters/{name:path}", openapi_extra=takes(UpdateFields), responses=gives(UpdatedBody))
    async def update(name: str, http: Request) -> dict[str, Any]:
        """Give a name a new version, from a folder (JSON) or from a body of safetensors; load it if it is new.

        The old version serves until the new one was read and checked. Then the name means the new one, at once. With
        `version`, the name means a version that is there.
        """
        before = registry.loaded(name)
        adapter = await _update(updates, http, name)
        current = registry.loaded(name) or adapter
        return {
            "name": name,
            "version": adapter.version,
            "previous": before.version if before else None,
            "current": current.version,
        }

    @app.delete("/v1/adapters/{name:path}", responses=gives(RemovedBody))
    async def remove(name: str, http: Request) -> dict[str, Any]:
        """Unload an adapter with all its versions, or one version (`name@version`) that the name does not mean.

        Open requests end first; new ones are refused at once.
        """
        key = access.key_of(http)
        with audited(http, key, "unload", adapter=name) as details:
            found = _named(registry, name)
            access.loader_of(http, found.name if found else name)
            if found is None:
                raise _unknown(access, key, name)
            versions = [found] if name != found.name else registry.versions(name)
            is_gone = await updates.remove(found, is_whole=name == found.name)
            if not is_gone:
                details["in_background"] = True
        return {"name": found.name, "versions": [one.version for one in versions], "is_gone": is_gone}


async def _update(updates: Updates, http: Request, name: str) -> Adapter:
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in WEIGHTS_TYPES:
        return await updates.from_body(http, name, read_query(http.query_params))
    if kind.startswith("multipart/"):
        message = (
            "Weights are not sent as multipart: send the safetensors as the whole body, as application/octet-stream, "
            "and adapter_config.json in the query parameter 'config'."
        )
        raise RequestError(Fault(FaultCode.BAD_FIELD, message, "content-type"))
    fields = read_body(UpdateFields, await http.body())
    fields.check()
    return await updates.from_fields(http, name, fields)


def _install_lists(app: FastAPI, access: Access, listing: Listing) -> None:
    @app.get("/v1/adapters", responses=gives(AdaptersListBody))
    async def adapters(http: Request) -> Response:
        """The adapters that a key may use: their versions, and the last ones that left."""
        return await list_response('{"object":"list","data":', listing.all_for(access.key_of(http)))

    @app.get("/v1/adapters/{name:path}", responses=gives(AdapterBody))
    async def adapter(name: str, http: Request) -> dict[str, Any]:
        """One adapter."""
        key = access.key_of(http)
        if not key.may_use(name):
            access.find(key, name)  # which says that it may not
        if name not in listing:
            raise _unknown(access, key, name)
        return listing.one(key, name)


def _named(registry: Registry, label: str) -> Adapter | None:
    """What exactly a client names: a loaded name, or a version of one."""
    if loaded := registry.loaded(label):
        return loaded
    name, number = split_label(label) or (label, 0)
    return next((one for one in registry.versions(name) if one.version == number), None)


def _unknown(access: Access, key: Key, name: str) -> RequestError:
    loaded = listed(sorted(one.name for one in access.visible(key)[1:]))
    message = f"No adapter or version named '{name[:200]}' is loaded; loaded are: {loaded}."
    return RequestError(Fault(FaultCode.UNKNOWN_MODEL, message, "name"))
