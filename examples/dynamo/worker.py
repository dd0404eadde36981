"""Rota as an engine of NVIDIA Dynamo: Dynamo's front end speaks HTTP and makes tokens of text, Rota serves tokens.

python worker.py [MODEL] [flags of `rota serve`]
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from uuid import uuid4

from dynamo.common import backend
from dynamo.common.backend.run import run
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, Unknown

from rota.cli import main
from rota.commands.engines import engine_service
from rota.core.config import EngineConfig, ServerConfig
from rota.core.errors import FaultCode, RequestError
from rota.core.events import Finished
from rota.core.ids import RequestId
from rota.core.request import Request, SamplingParams
from rota.llm.config import build_device, first_adapters, locate_model
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.runtime.seeds import seeded
from rota.server.streams import CallReply, Streams
from rota.text.tokenizer import Tokenizer

GROUPS = ("sampling_options", "stop_conditions", "output_options")
PENALTIES = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed", *PENALTIES}
# Of these Dynamo's front end takes care, or `_asked` does.
STOPPING = {"max_tokens", "ignore_eos", "stop", "stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden"}
SHOWING = {"include_stop_str_in_output", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids"}
ENDED = {FaultCode.ENGINE_DIED: EngineShutdown, FaultCode.STOPPING: EngineShutdown}


class RotaEngine(backend.LLMEngine):
    """One engine of Rota, with the model and its adapters under their names."""

    def __init__(self, config: EngineConfig, server: ServerConfig) -> None:
        config = locate_model(config)
        self._folder = str(config.model.model_path)
        self._registry = Registry(server.served_model_name or Path(self._folder).resolve().name, self._folder)
        adapters = [self._registry.add(entry) for entry in first_adapters(config)]
        self._service = EngineClient(engine_service(config, server, build_device), adapters)
        self._streams = Streams(self._service)
        self._ends = Tokenizer(Path(self._folder)).eos_ids
        self._replies: dict[str, CallReply] = {}
        self._drain_s = server.drain_timeout

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[RotaEngine, backend.WorkerConfig]:
        chosen: list[tuple[EngineConfig, ServerConfig]] = []
        try:
            main(["serve", *(sys.argv[1:] if argv is None else argv)], serve=lambda *configs: chosen.append(configs))
        except SystemExit:
            if not chosen:  # it was --help or a mistake, and was answered
                raise
        engine = cls(*chosen[0])
        return engine, backend.WorkerConfig(
            namespace=os.environ.get("DYN_NAMESPACE", "dynamo"),
            component="rota",
            model_name=engine._folder,
            discovery_backend=os.environ.get("DYN_DISCOVERY_BACKEND", "file"),
            enable_kv_routing=False,  # Rota tells Dynamo's router nothing of its KV cache
        )

    async def start(self, worker_id: int) -> backend.EngineConfig:  # noqa: ARG002
        self._streams.start()
        self._has = has = await asyncio.to_thread(self._service.wait_until_ready)
        limits = (has.max_sequence_tokens, has.block_size, has.blocks, has.rows)
        told = backend.LlmRegistration(*limits, max_gpu_lora_count=has.slots)
        return backend.EngineConfig(model=self._folder, served_model_name=self._registry.base.name, llm=told)

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        """To Dynamo's front end every adapter is a model with a name of its own."""
        here = (ModelInput.Tokens, ModelType.Chat | ModelType.Completions, endpoint, self._folder)
        base = {"base_model_path": self._folder, "worker_type": WorkerType.Aggregated, "ignore_weights": True}
        for adapter in self._registry.adapters:
            await register_model(*here, lora_name=adapter.name, max_gpu_lora_count=self._has.slots, **base)

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        try:
            reply = self._replies[context.id()] = self._streams.open([self._asked(request)])
            is_open = True
            while is_open:
                (delta,) = await reply.next()
                is_open = delta.ending is None
                yield {"token_ids": delta.tokens, "index": 0, **(_last(delta.ending) if delta.ending else {})}
        except RequestError as error:
            kind = InvalidArgument if error.fault.param else ENDED.get(error.fault.code, Unknown)
            raise kind(error.fault.message) from error
        finally:
            if one := self._replies.pop(context.id(), None):
                one.close()

    def _asked(self, request: dict[str, Any]) -> Request:
        given, prompt = _given(request), tuple(request["token_ids"])
        ends: frozenset[int] = frozenset() if "ignore_eos" in given else self._ends
        sampling = SamplingParams(
            **{name: given[name] for name in SAMPLING & given.keys()},
            # Where a client sets no limit, its answer may fill the context.
            max_new_tokens=given.get("max_tokens", max(1, self._has.max_sequence_tokens - len(prompt))),
            stop_token_ids=ends.union(given.get("stop_token_ids", ())),
        )
        return Request(
            request_id=RequestId(uuid4().hex),
            prompt=prompt,
            sampling=seeded(sampling),
            arrived_at=time.monotonic(),
            adapter_id=self._registry.find(request.get("model")).adapter_id,
        )

    async def abort(self, context: Any) -> None:
        if reply := self._replies.get(context.id()):
            reply.cancel()

    async def cleanup(self) -> None:
        await asyncio.to_thread(self._service.drain, self._drain_s)
        await asyncio.to_thread(self._service.stop)


def _given(request: dict[str, Any]) -> dict[str, Any]:
    """What a client has set. Raises RequestError for what this engine would not heed."""
    pairs = [pair for group in GROUPS for pair in (request.get(group) or {}).items() if pair != ("n", 1)]
    given = {name: value for name, value in pairs if value is not None and value is not False}
    if unknown := sorted(given.keys() - SAMPLING - STOPPING - SHOWING):
        raise RequestError.bad_field(unknown[0], f"Rota as an engine of Dynamo does not know {', '.join(unknown)}.")
    return given


def _last(ending: Finished) -> dict[str, Any]:
    if ending.fault:
        raise RequestError(ending.fault)
    usage = {"prompt_tokens": ending.prompt_tokens, "completion_tokens": ending.output_tokens}
    usage["total_tokens"] = sum(usage.values())
    return {"finish_reason": ending.reason.value, "completion_usage": usage}


if __name__ == "__main__":
    run(RotaEngine)
