"""An engine's config comes from options by name, and a device is built from that config."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rota.core.config import CacheConfig, EngineConfig, FirstAdapters, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.lora_paths import LoraPath, parse_lora_paths
from rota.core.options import build
from rota.core.policy_config import PolicyConfig
from rota.engine.folders.builtin import builtin_adapters, builtin_model_folder
from rota.engine.folders.hub import model_folder
from rota.engine.lora.files.ranks import extras_of, ranks_of
from rota.engine.lora.pages import pages_for
from rota.engine.progress import listen_for_progress
from rota.policy.policy_options import policy_config
from rota.runtime.process_age import process_began_at
from rota.runtime.progress import tell_progress
from rota.runtime.ranks.lead import build_ranks
from rota.runtime.trials import known_trials, tell_trials
from rota.runtime.world import Device

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
        found = builtin_adapters().items()
        folder = builtin_model_folder(config.quiet)
        builtin = tuple(LoraPath(name=name, path=str(path), is_builtin=True) for name, path in found)
    model = replace(config.model, model_path=str(folder))
    config = replace(config, model=model, builtin_adapters=builtin)
    return with_first(config, first_adapters(config))


def with_first(config: EngineConfig, entries: Collection[LoraPath]) -> EngineConfig:
    """The same config with slots for these adapters. Their folders are looked at once, here: a restart does not."""
    is_asked, root = config.lora.max_lora_rank == "auto", config.lora.adapter_root
    ranks, extras = ranks_of(entries, root) if is_asked else [], extras_of(entries, root)
    first = FirstAdapters(
        count=len(entries), rank=max(ranks, default=0), pages=sum(map(pages_for, ranks)), extras=extras
    )
    return replace(config, first=first)


def first_adapters(config: EngineConfig) -> list[LoraPath]:
    """The adapters to start with: the built-in adapters, then the named ones. A named one replaces its namesake."""
    asked = parse_lora_paths(config.lora.lora_paths)
    taken = {entry.name for entry in asked}
    return [*(entry for entry in config.builtin_adapters if entry.name not in taken), *asked]


def import_device(device: str | None) -> None:
    """The imports of `build_device`, ahead of time, for a device such as "cuda"."""
    import rota.grammar.grammars
    import rota.text.tokenizer  # noqa: F401
    from rota.engine.imports import import_engine

    import_engine(device)


def build_device(config: EngineConfig) -> Device[Any]:
    """The engine, or the engines of all ranks as one device."""
    return build_ranks(_build_engine, config)


def _build_engine(config: EngineConfig) -> Device[Any]:
    """This call loads torch, which a server's own process does not need."""
    from rota.engine.build import build_engine
    from rota.engine.stages import StageRecorder
    from rota.engine.trials import Trials
    from rota.grammar.grammars import LlGrammars
    from rota.text.tokenizer import Tokenizer

    listen_for_progress(tell_progress)  # a follower's progress is a sign of life to its leader
    stage = StageRecorder(process_began_at())
    stage.note_past("imports")
    trials = Trials(known_trials())
    engine = build_engine(config, stage=stage, trials=trials)
    tell_trials(trials.made)
    if config.rank == 0 and engine.capacity.vocabulary and config.model.model_path:  # other ranks draw no tokens
        engine.use_grammars(LlGrammars(partial(Tokenizer, config.model.model_path), engine.capacity.vocabulary))
    return engine
