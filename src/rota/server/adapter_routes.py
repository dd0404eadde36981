"""Routes that load and unload adapters, in the shapes that vLLM's and SGLang's clients know."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict

from rota.core.errors import AdapterError
from rota.core.lora_paths import LoraPath
from rota.server.adapters import AdapterFront
from rota.server.fields import read_body


class UnloadFields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str


class LoadFields(UnloadFields):
    lora_path: str


class PinnableLoadFields(LoadFields):
    pinned: bool | None = None


def install_adapter_routes(app: FastAPI, adapters: AdapterFront) -> None:
    """vLLM's answer with a text, or OpenAI's error; SGLang's say what is loaded in either case."""

    @app.post("/v1/load_lora_adapter")
    async def load(http: Request) -> Response:
        fields = read_body(LoadFields, await http.body())
        await adapters.load(LoraPath(fields.lora_name, fields.lora_path))
        return PlainTextResponse(f"Adapter '{fields.lora_name}' is loaded.")

    @app.post("/v1/unload_lora_adapter")
    async def unload(http: Request) -> Response:
        fields = read_body(UnloadFields, await http.body())
        is_gone = await adapters.unload(fields.lora_name)
        return PlainTextResponse(
            f"Adapter '{fields.lora_name}' is unloaded." if is_gone else _in_background(fields.lora_name)
        )

    @app.post("/load_lora_adapter")
    async def load_and_list(http: Request) -> Response:
        fields = read_body(PinnableLoadFields, await http.body())
        try:
            await adapters.load(LoraPath(fields.lora_name, fields.lora_path, is_pinned=bool(fields.pinned)))
        except AdapterError as error:
            return outcome(False, str(error))
        return outcome(True)

    @app.post("/unload_lora_adapter")
    async def unload_and_list(http: Request) -> Response:
        fields = read_body(UnloadFields, await http.body())
        try:
            is_gone = await adapters.unload(fields.lora_name)
        except AdapterError as error:
            return outcome(False, str(error))
        return outcome(True, None if is_gone else _in_background(fields.lora_name))

    def outcome(is_success: bool, message: str | None = None) -> Response:
        loaded = {adapter.name: adapter.path for adapter in adapters.loaded}
        body = {"success": is_success, "error_message": message, "loaded_adapters": loaded}
        return JSONResponse(body, 200 if is_success else 400)


def _in_background(name: str) -> str:
    return f"Adapter '{name}' takes no new requests; it goes in the background when its last ones have ended."
