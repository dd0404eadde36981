"""An engine's config comes from options by name, and a device is built from that config."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, reduce
from importlib import import_module
from operator import or_
from typing import Any

from rota.core.adapter import Extra
from rota.core.config import CacheConfig, EngineConfig, FirstAdapters, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.lora_paths import LoraPath, parse_lora_paths
from rota.core.options import build
from rota.core.policy_config import PolicyConfig
from rota.engine.folders.builtin import builtin_adapters, builtin_model_folder
from rota.engine.folders.hub import model_folder
from rota.engine.lora.files.brought import Brought
from rota.engine.lora.files.ranks import needs_of, pages_for
from rota.extensions import needed
from rota.llm.adapter_room import AdapterRoom
from rota.policy.policy_options import policy_config
from rota.runtime.world import Device
from rota.sources.prefix import Prefix
from rota.sources.sources import Locator, sources_for
from rota.start import START

# PyTorch takes most of their time, and Triton the next.
OF_ENGINE = ("rota.engine.build", "rota.grammar.grammars", "rota.text.tokenizer")
# Modules with kernels for a GPU. An engine imports those that it chooses. FlashInfer is not among them: its import may
# ask for a GPU.
ON_GPU = (
    "rota.engine.attention.triton_attention",
    "rota.engine.lora.triton_ops",
    "rota.engine.lora.triton_embed_head",
    "rota.engine.ops.fused",
    "rota.engine.quantised.packed_product",
    "rota.engine.quantised.scaled_product",
    "rota.engine.sampling.triton_sampling",
)
ENGINE_CONFIGS = (ModelConfig, CacheConfig, SchedulerConfig, LoraConfig, PolicyConfig)


def engine_config(options: Mapping[str, Any], quiet: bool) -> EngineConfig:
    """The engine's config from options by name. Options that are not the engine's are ignored."""
    policy = policy_config(options)  # first, so that a wrong policy is refused before the model is read
    return EngineConfig(
        model=build(ModelConfig, options),
        cache=build(CacheConfig, options),
        scheduler=build(SchedulerConfig, options),
        lora=build(LoraConfig, options),
        policy=policy,
        quiet=quiet,
    )


def locate_model(config: EngineConfig) -> EngineConfig:
    """The same config with the model's folder. Without a model: the built-in model's folder and its adapters."""
    if config.model.model_path is not None:
        folder, builtin = model_folder(config.model.model_path), config.builtin_adapters
    else:
        found = builtin_adapters().items() if config.lora.enable_builtin_adapters else ()
        folder = builtin_model_folder(config.quiet)
        builtin = tuple(LoraPath(name=name, path=str(path), is_builtin=True) for name, path in found)
    model = replace(config.model, model_path=str(folder))
    return replace(config, model=model, builtin_adapters=builtin)


def locator_for(lora: LoraConfig) -> Locator:
    return Locator(lora.adapter_root, sources_for(lora))


def prefix_for(lora: LoraConfig) -> Prefix | None:
    """Where names that are not loaded are looked for. Raises ConfigError for a place that cannot be."""
    return None if lora.lora_resolver is None else Prefix(lora.lora_resolver)


def with_first(config: EngineConfig, entries: Collection[LoraPath]) -> EngineConfig:
    """The same config with slots for these adapters. Their folders are looked at once, here: a restart does not."""
    return replace(config, first=first_of(config, entries))


def first_of(config: EngineConfig, entries: Collection[LoraPath]) -> FirstAdapters:
    """What these adapters need of slots. Blocks on their folders."""
    room = AdapterRoom()  # its process is started by the first pattern, which few adapters have
    try:
        needs = needs_of(entries, Brought(config.lora.adapter_root, sources_for(config.lora)), room.ask)
    finally:
        room.close()
    ranks = [one.rank for one in needs] if config.lora.max_lora_rank == "auto" else []
    extras = reduce(or_, (one.extras for one in needs), Extra.NONE)
    return FirstAdapters(
        count=len(entries),
        rank=max(ranks, default=0),
        pages=sum(map(pages_for, ranks)),
        extras=extras,
        matrices=sum(one.matrices for one in needs),
    )


def told_later(config: EngineConfig) -> EngineConfig:
    """The same config for an engine that hears of its first adapters while it imports, and of each by a message."""
    return replace(config, first=None, lora=replace(config.lora, lora_paths=()))


def first_adapters(config: EngineConfig) -> list[LoraPath]:
    """The adapters to start with: the built-in adapters, then the named ones. A named one replaces its namesake.

    Those that lie in sources have the addresses of what lies there now, so this may block on the network.
    """
    asked = locator_for(config.lora).locate_first(parse_lora_paths(config.lora.lora_paths))
    taken = {entry.name for entry in asked}
    return [*(entry for entry in config.builtin_adapters if entry.name not in taken), *asked]


def import_device(device: str | None) -> None:
    """The imports of `build_device`, ahead of time, for a device such as "cuda": none of them touches a GPU."""
    for name in (*OF_ENGINE, *(ON_GPU if device == "cuda" else ())):
        import_module(name)


def release_memory() -> None:
    """What an engine leaves behind hangs together in circles, and torch keeps a GPU's memory for the next one."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that has multiplied, 32 MB on an H200
        torch.cuda.empty_cache()


def build_device(config: EngineConfig) -> Device[Any]:
    """The engine, or the engines of all ranks as one device."""
    if config.model.tensor_parallel_size == 1 or config.meeting:
        return _build_engine(config)
    device: Device[Any] = needed("ranks", "--tensor-parallel-size").build_ranks(_build_engine, config)
    return device


def _build_engine(config: EngineConfig) -> Device[Any]:
    """This call loads torch, which a server's own process does not need."""
    from rota.engine.autotune import AutotuneCache, StageRecorder
    from rota.engine.build import build_engine
    from rota.grammar.grammars import LlGrammars
    from rota.text.tokenizer import Tokenizer

    room = AdapterRoom()
    room.start()
    stage = StageRecorder(START.began_at())
    stage.note_past("imports")
    autotuned = AutotuneCache(START.autotuned)
    if config.first is None:
        config = replace(config, first=START.wait_for_first())
    with ExitStack() as undone:
        undone.callback(room.end)  # of a build that fails
        engine = build_engine(config, stage=stage, autotuned=autotuned, ask=room.ask)
        undone.pop_all()
    weakref.finalize(engine, room.end)  # of an engine that is never closed
    engine.closing.callback(room.close)
    START.autotuned = autotuned.made
    if config.rank == 0 and engine.capacity.vocabulary and config.model.model_path:  # other ranks draw no tokens
        engine.use_grammars(LlGrammars(partial(Tokenizer, config.model.model_path), engine.capacity.vocabulary))
    return engine
