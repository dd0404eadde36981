"""As much of NVIDIA Dynamo's Python package as the example uses, for machines without it."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Record(SimpleNamespace):
    """Holds what it was made with."""


@dataclass
class LlmRegistration:
    """With its fields in Dynamo's order: the example gives the first four by position."""

    context_length: int | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_gpu_lora_count: int | None = None


class LLMEngine:
    """What an engine is made from; Dynamo's has more methods, with nothing in them."""


class InvalidArgumentStub(Exception):
    """The client has asked for what cannot be."""


class EngineShutdownStub(Exception):
    """The engine is gone or goes."""


class UnknownStub(Exception):
    """Anything else."""


@dataclass
class Context:
    """Of one request."""

    name: str

    def id(self) -> str:
        return self.name


def imported_worker(monkeypatch: pytest.MonkeyPatch, registered: list[str]) -> Any:
    """The example's module over these stubs; `registered` gets the names of its adapters."""

    async def register_model(*_: Any, lora_name: str, **__: Any) -> None:
        registered.append(lora_name)

    backend = {
        "LLMEngine": LLMEngine,
        "LlmRegistration": LlmRegistration,
        "EngineConfig": Record,
        "WorkerConfig": Record,
    }
    kinds = {
        "ModelInput": Record(Tokens=1),
        "ModelType": Record(Chat=1, Completions=2),
        "WorkerType": Record(Aggregated=1),
        "register_model": register_model,
    }
    errors = {"InvalidArgument": InvalidArgumentStub, "EngineShutdown": EngineShutdownStub, "Unknown": UnknownStub}
    stubs: dict[str, dict[str, Any]] = {
        "dynamo": {},
        "dynamo.common": {},
        "dynamo.common.backend": backend,
        "dynamo.common.backend.run": {"run": lambda _: None},
        "dynamo.llm": kinds,
        "dynamo.llm.exceptions": errors,
    }
    for name, content in stubs.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], last, module, raising=False)
    monkeypatch.delitem(sys.modules, "examples.dynamo.worker", raising=False)
    return importlib.import_module("examples.dynamo.worker")
