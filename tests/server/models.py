"""A server whose engine is a real and tiny model, and a client of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from rota.core.lora_paths import LoraPath
from rota.llm.config import build_device, engine_config
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.server.access.access import Access
from rota.server.access.key_file import read_keys
from rota.text.tokenizer import Tokenizer
from tests.server.applications import made_app, running
from tests.server.engines import engines
from tests.waiting import TIMEOUT_S

TINY = {"device": "cpu", "dtype": "float32", "kv_blocks": 64, "max_running_requests": 4}


@contextmanager
def serving_model(
    folder: Path, adapters: Iterable[LoraPath] = (), keys: str = "", has_grammars: bool = False, **options: Any
) -> Iterator[httpx.Client]:
    """The server is named "tiny"; `keys` is the text of a key file, and `options` are those of `rota serve`."""
    config = engine_config({**TINY, "model_path": str(folder), **options}, quiet=True)
    registry = Registry("tiny", str(folder))
    service = EngineClient(engines(partial(build_device, config), config), [registry.add(one) for one in adapters])
    access = None
    if keys:
        file = folder / "keys.toml"
        file.write_text(keys)
        file.chmod(0o600)
        access = Access(registry, read_keys([], str(file), config.lora.adapter_root))
    app = made_app(service, Tokenizer(folder), registry, access=access, has_grammars=has_grammars)
    with running(app) as url, httpx.Client(base_url=url) as client:
        service.wait_until_ready(TIMEOUT_S)
        yield client
