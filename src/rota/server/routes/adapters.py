"""Routes load, renew, list and unload adapters, in Rota's own shape and in those of vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, replace

import msgspec
from fastapi import Request, Response
from fastapi.responses import PlainTextResponse

from rota.core.adapter import Adapter, listed
from rota.core.errors import AdapterError, Fault, FaultCode, RequestError
from rota.core.lora_paths import LoraPath
from rota.runtime.registry import Registry
from rota.server.access.access import Access
from rota.server.access.audit import audited
from rota.server.access.disclosure import path_for, reason_for
from rota.server.access.keys import Key
from rota.server.adapters.listing import AdapterBody
from rota.server.adapters.manager import AT_ONCE, MAX_NAME, check_name
from rota.server.adapters.updates import RemovedBody, UpdatedBody, UpdateFields, read_query
from rota.server.calls.fields import Fields, Unsupported, read_body
from rota.server.context import AppContext
from rota.server.errors import ERROR_KINDS
from rota.server.route import list_response

# ── vLLM's and SGLang's ─────────────────────────────────────────────────────────────────────────────────────────────
# vLLM's routes answer with a text, or with OpenAI's error. SGLang's list the loaded adapters, also after an error.


@dataclass(frozen=True, slots=True)
class AdaptersBody:
    """The result, and the adapters that are loaded now: folders for operators, names for other keys."""

    success: bool
    error_message: str | None
    loaded_adapters: dict[str, str]


class UnloadFields(Fields):
    """Which adapter to unload."""

    lora_name: str
    # Not used: the name says which adapter it is. Clients of vLLM send this number.
    lora_int_id: int | None = None


class LoadFields(Fields):
    """Which adapter to load, and its folder."""

    lora_name: str
    lora_path: str
    # A name that is loaded already gets a new version.
    load_inplace: bool | None = None
    is_3d_lora_weight: Unsupported = None


class NativeUnloadFields(Fields):
    """Which adapter to unload."""

    lora_name: str
    # Not used: the server gives adapters their ids, and such a call needs no id of its own.
    lora_id: str | None = None
    rid: str | None = None


class NativeLoadFields(NativeUnloadFields):
    """Which adapter to load, and its folder. A pinned adapter never leaves its slot."""

    lora_path: str
    pinned: bool | None = None
    added_tokens_config: Unsupported = None


async def load(context: AppContext, http: Request) -> Response:
    """Load an adapter, in vLLM's shape. Answers when requests may name it."""
    fields = read_body(LoadFields, await http.body())
    if fields.load_inplace:
        fields.refuse_unsupported()
        await context.updates.from_folder(http, fields.lora_name, fields.lora_path, None, AT_ONCE, "lora_path")
    else:
        await _load(context, http, fields)
    return PlainTextResponse(f"Adapter '{fields.lora_name}' is loaded.")


async def unload(context: AppContext, http: Request) -> Response:
    """Unload an adapter, in vLLM's shape. Its open requests end first; new ones are refused at once."""
    fields = read_body(UnloadFields, await http.body())
    remark = await _unload(context, http, fields.lora_name)
    return PlainTextResponse(remark or f"Adapter '{fields.lora_name}' is unloaded.")


async def load_and_list(context: AppContext, http: Request) -> Response:
    """Load an adapter, in SGLang's shape. Answers with success or the reason, and the loaded adapters."""
    fields = read_body(NativeLoadFields, await http.body())
    return await _outcome(context, http, _load(context, http, fields, is_pinned=bool(fields.pinned)))


async def unload_and_list(context: AppContext, http: Request) -> Response:
    """Unload an adapter, in SGLang's shape. Its open requests end first; new ones are refused at once."""
    fields = read_body(NativeUnloadFields, await http.body())
    return await _outcome(context, http, _unload(context, http, fields.lora_name))


async def load_tensors_and_list(context: AppContext, http: Request) -> Response:
    """Load an adapter from its weights, in SGLang's shape, or give its name a new version.

    `serialized_tensors` is base64 of safetensors. SGLang's own form is a pickle, which is refused.
    """
    return await _outcome(context, http, context.updates.from_tensors(http))


async def _load(
    context: AppContext, http: Request, fields: LoadFields | NativeLoadFields, is_pinned: bool = False
) -> None:
    """Load an adapter for the key of a request. The adapter is the key's own from then on."""
    access = context.access
    key, name = access.key_of(http), fields.lora_name
    with audited(http, key, "load", adapter=name, path=fields.lora_path):
        access.loader_of(http, name)
        access.refuse_loads(key)
        if is_pinned:
            access.operator_of(http, "pinned")  # a pinned slot is lost to all other keys
        fields.refuse_unsupported()
        check_name(name)
        asked = LoraPath(name=name, path=fields.lora_path, is_pinned=is_pinned, root=key.adapter_root)
        await context.adapters.load(asked, lambda found: replace(found, owner=access.loader_of(http, name).name))


async def _unload(context: AppContext, http: Request, name: str) -> str | None:
    """Unload an adapter; a sentence if its last requests are still open.

    If the name is not loaded, the error lists the loaded adapters that the key may use.
    """
    key = context.access.key_of(http)
    with audited(http, key, "unload", adapter=name) as details:
        context.access.loader_of(http, name)
        if not (context.registry.loaded(name) and key.may_use(name)):
            loaded = listed(sorted(_own_adapters(context.registry, key)))
            raise AdapterError(f"No adapter named '{name[:MAX_NAME]}' is loaded; loaded are: {loaded}.")
        if await context.adapters.unload(name):
            return None
        details["in_background"] = True
    return f"Adapter '{name}' takes no new requests; it is unloaded in the background when its last ones have ended."


async def _outcome(context: AppContext, http: Request, act: Awaitable[str | None]) -> Response:
    """SGLang's answer: the loaded adapters after a success and after an error, with what is to be said."""
    key, status = context.access.key_of(http), 200
    try:
        message = await act
    except AdapterError as error:
        message, status = reason_for(key, str(error)), ERROR_KINDS[error.code].status
    body = AdaptersBody(status == 200, message, _own_adapters(context.registry, key))
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _own_adapters(registry: Registry, key: Key) -> dict[str, str]:
    """By name: the folder for operators, and the name for other keys."""
    return {adapter.name: path_for(key, adapter) for adapter in registry.adapters if key.may_use(adapter.name)}


# ── versions ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Rota's own routes renew adapters, list their versions, and remove them one by one.

WEIGHTS_TYPES = ("application/octet-stream", "application/safetensors", "application/x-safetensors")


async def adapters(context: AppContext, http: Request) -> Response:
    """The adapters that a key may use: their versions, and the last ones that left."""
    return await list_response('{"object":"list","data":', context.listing.all_for(context.access.key_of(http)))


async def adapter(context: AppContext, name: str, http: Request) -> AdapterBody:
    """One adapter."""
    key = context.access.key_of(http)
    if not key.may_use(name):
        context.access.find(key, name)  # which says that it may not
    if context.registry.loaded(name) is None:
        raise _unknown(context.access, key, name)
    return context.listing.one(key, name)


async def update(context: AppContext, name: str, http: Request) -> UpdatedBody:
    """Give a name a new version, from a folder (JSON) or from a body of safetensors; load it if it is new.

    The old version serves until the new one was read and checked. Then the name means the new one, at once. With
    `version`, the name means a version that is there.
    """
    before = context.registry.loaded(name)
    adapter = await _update(context, http, name)
    current = context.registry.loaded(name) or adapter
    return UpdatedBody(
        name=name,
        version=adapter.version,
        previous=before.version if before else None,
        current=current.version,
    )


async def _update(context: AppContext, http: Request, name: str) -> Adapter:
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in WEIGHTS_TYPES:
        return await context.updates.from_body(http, name, read_query(http.query_params))
    if kind.startswith("multipart/"):
        message = (
            "Weights are not sent as multipart: send the safetensors as the whole body, as application/octet-stream, "
            "and adapter_config.json in the query parameter 'config'."
        )
        raise RequestError(Fault(FaultCode.BAD_FIELD, message, "content-type"))
    fields = read_body(UpdateFields, await http.body())
    fields.check()
    return await context.updates.from_fields(http, name, fields)


async def remove(context: AppContext, name: str, http: Request) -> RemovedBody:
    """Unload an adapter with all its versions, or one version (`name@version`) that the name does not mean.

    Open requests end first; new ones are refused at once.
    """
    access, registry = context.access, context.registry
    key = access.key_of(http)
    with audited(http, key, "unload", adapter=name) as details:
        found = registry.exact(name)
        access.loader_of(http, found.name if found else name)
        if found is None:
            raise _unknown(access, key, name)
        versions = [found] if name != found.name else registry.versions(name)
        unload = context.adapters.unload(name) if name == found.name else context.adapters.unload_version(found)
        is_gone = await unload
        if not is_gone:
            details["in_background"] = True
    return RemovedBody(name=found.name, versions=[one.version for one in versions], is_gone=is_gone)


def _unknown(access: Access, key: Key, name: str) -> RequestError:
    loaded = listed(sorted(one.name for one in access.visible(key)[1:]))
    message = f"No adapter or version named '{name[:200]}' is loaded; loaded are: {loaded}."
    return RequestError(Fault(FaultCode.UNKNOWN_MODEL, message, "name"))
