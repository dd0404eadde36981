"""Routes load and unload adapters, in the shapes of vLLM and SGLang."""

from __future__ import annotations

from dataclasses import replace

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel

from rota.core.adapter import listed
from rota.core.errors import AdapterError
from rota.core.lora_paths import LoraPath
from rota.server.access.access import Access
from rota.server.access.audit import audited
from rota.server.access.disclosure import path_for, reason_for
from rota.server.access.keys import Key
from rota.server.adapters.manager import AT_ONCE, MAX_NAME, AdapterManager, check_name
from rota.server.adapters.updates import Updates
from rota.server.adapters.upload import TensorsFields
from rota.server.calls.fields import Fields, Unsupported, read_body
from rota.server.docs import gives, takes
from rota.server.errors import ERROR_KINDS, code_of


class AdaptersBody(BaseModel):
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


def install_adapter_routes(app: FastAPI, adapters: AdapterManager, access: Access, updates: Updates) -> None:
    _install_vllm_routes(app, adapters, access, updates)
    _install_sglang_routes(app, adapters, access)
    _install_tensors_route(app, adapters, access, updates)


def _install_vllm_routes(app: FastAPI, adapters: AdapterManager, access: Access, updates: Updates) -> None:
    """These answer with a text, or with OpenAI's error."""

    @app.post("/v1/load_lora_adapter", openapi_extra=takes(LoadFields), response_class=PlainTextResponse)
    async def load(http: Request) -> Response:
        """Load an adapter, in vLLM's shape. Answers when requests may name it."""
        fields = read_body(LoadFields, await http.body())
        if fields.load_inplace:
            fields.refuse_unsupported()
            await updates.from_folder(http, fields.lora_name, fields.lora_path, None, AT_ONCE, "lora_path")
        else:
            await _load(adapters, access, http, fields)
        return PlainTextResponse(f"Adapter '{fields.lora_name}' is loaded.")

    @app.post("/v1/unload_lora_adapter", openapi_extra=takes(UnloadFields), response_class=PlainTextResponse)
    async def unload(http: Request) -> Response:
        """Unload an adapter, in vLLM's shape. Its open requests end first; new ones are refused at once."""
        fields = read_body(UnloadFields, await http.body())
        is_gone = await _unload(adapters, access, http, fields.lora_name)
        return PlainTextResponse(
            f"Adapter '{fields.lora_name}' is unloaded." if is_gone else _in_background(fields.lora_name)
        )


def _install_sglang_routes(app: FastAPI, adapters: AdapterManager, access: Access) -> None:
    """These list the loaded adapters, after a success and after an error."""

    @app.post("/load_lora_adapter", openapi_extra=takes(NativeLoadFields), responses=gives(AdaptersBody))
    async def load_and_list(http: Request) -> Response:
        """Load an adapter, in SGLang's shape. Answers with success or the reason, and the loaded adapters."""
        fields = read_body(NativeLoadFields, await http.body())
        key = access.key_of(http)
        try:
            await _load(adapters, access, http, fields, is_pinned=bool(fields.pinned))
        except AdapterError as error:
            return _outcome(adapters, key, str(error), ERROR_KINDS[code_of(error)].status)
        return _outcome(adapters, key)

    @app.post("/unload_lora_adapter", openapi_extra=takes(NativeUnloadFields), responses=gives(AdaptersBody))
    async def unload_and_list(http: Request) -> Response:
        """Unload an adapter, in SGLang's shape. Its open requests end first; new ones are refused at once."""
        fields = read_body(NativeUnloadFields, await http.body())
        key = access.key_of(http)
        try:
            is_gone = await _unload(adapters, access, http, fields.lora_name)
        except AdapterError as error:
            return _outcome(adapters, key, str(error), ERROR_KINDS[code_of(error)].status)
        return _outcome(adapters, key, None if is_gone else _in_background(fields.lora_name))


def _install_tensors_route(app: FastAPI, adapters: AdapterManager, access: Access, updates: Updates) -> None:
    @app.post("/load_lora_adapter_from_tensors", openapi_extra=takes(TensorsFields), responses=gives(AdaptersBody))
    async def load_tensors_and_list(http: Request) -> Response:
        """Load an adapter from its weights, in SGLang's shape, or give its name a new version.

        `serialized_tensors` is base64 of safetensors. SGLang's own form is a pickle, which is refused.
        """
        key = access.key_of(http)
        try:
            await updates.from_tensors(http)
        except AdapterError as error:
            return _outcome(adapters, key, str(error), ERROR_KINDS[code_of(error)].status)
        return _outcome(adapters, key)


async def _load(
    adapters: AdapterManager,
    access: Access,
    http: Request,
    fields: LoadFields | NativeLoadFields,
    is_pinned: bool = False,
) -> None:
    """Load an adapter for the key of a request. The adapter is the key's own from then on."""
    key, name = access.key_of(http), fields.lora_name
    try:
        with audited(http, key, "load", adapter=name, path=fields.lora_path):
            access.loader_of(http, name)
            access.refuse_loads(key)
            if is_pinned:
                access.operator_of(http, "pinned")  # a pinned slot is lost to all other keys
            fields.refuse_unsupported()
            check_name(name)
            asked = LoraPath(name=name, path=fields.lora_path, is_pinned=is_pinned, root=key.adapter_root)
            await adapters.load(asked, lambda found: replace(found, owner=access.loader_of(http, name).name))
    except AdapterError as error:
        raise error.reworded(reason_for(key, str(error))) from None


async def _unload(adapters: AdapterManager, access: Access, http: Request, name: str) -> bool:
    """Unload an adapter. If the name is not loaded, the error lists the loaded adapters that the key may use."""
    key = access.key_of(http)
    with audited(http, key, "unload", adapter=name) as details:
        access.loader_of(http, name)
        if not (adapters.has(name) and key.may_use(name)):
            loaded = listed(sorted(_own_adapters(adapters, key)))
            raise AdapterError(f"No adapter named '{name[:MAX_NAME]}' is loaded; loaded are: {loaded}.")
        is_gone = await adapters.unload(name)
        if not is_gone:
            details["in_background"] = True
        return is_gone


def _outcome(adapters: AdapterManager, key: Key, message: str | None = None, status: int = 200) -> Response:
    body = {"success": status == 200, "error_message": message, "loaded_adapters": _own_adapters(adapters, key)}
    return JSONResponse(body, status)


def _own_adapters(adapters: AdapterManager, key: Key) -> dict[str, str]:
    """By name: the folder for operators, and the name for other keys."""
    return {adapter.name: path_for(key, adapter) for adapter in adapters.loaded if key.may_use(adapter.name)}


def _in_background(name: str) -> str:
    return f"Adapter '{name}' takes no new requests; it is unloaded in the background when its last ones have ended."
