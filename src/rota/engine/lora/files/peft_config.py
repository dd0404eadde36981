"""A PeftConfig is an adapter_config.json: it says whether a module has factors, and their rank and scale."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rota.core.errors import AdapterError, ModelError
from rota.core.extras import Extra
from rota.engine.lora.files.fields import refused_fields
from rota.engine.lora.files.names import ENDS, EVERY_LINEAR, is_named
from rota.engine.lora.files.ranks import extras_in, read_own_modules, read_own_tokens
from rota.engine.model.config_file import ConfigFile, read_json
from rota.engine.model.sites import PARENTS, module_names

BIASES = ("none", "lora_only", "all")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields of an adapter_config.json that matter; None or empty where the file has none."""

    path: Path
    rank: int
    alpha: float
    is_rank_stabilised: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    targets: tuple[str, ...] | str | None
    excluded: tuple[str, ...] | str | None
    layers: tuple[int, ...]
    layers_patterns: tuple[str, ...]
    is_dora: bool
    has_factor_biases: bool  # B has a bias
    biases: str  # which biases of the model are its own: none, lora_only or all
    extras: Extra
    is_tying: bool  # with tied embeddings the head has what the embedding has
    own_tokens: dict[str, tuple[int, ...]]  # by module at an end: the tokens that have rows of the adapter's own
    own_modules: tuple[str, ...]  # the ends that are whole matrices of the adapter's own
    base_model: str | None
    refusals: tuple[str, ...]  # why Rota cannot serve it with any model

    def changes_bias(self, module: str) -> bool:
        """Whether the adapter has its own values for a bias that the model has."""
        return self.biases == "all" or (self.biases == "lora_only" and self.targets_module(module))

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.get(_pattern_for(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of B A."""
        alpha = self.alpha_pattern.get(_pattern_for(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.is_rank_stabilised else alpha / rank

    def targets_module(self, module: str) -> bool:
        """Whether the module has factors; true for every module if the file does not name its targets."""
        if module in self.own_modules or (self.excluded is not None and is_named(self.excluded, module)):
            return False
        if self.targets is None:
            return True
        if self.targets == EVERY_LINEAR:
            return module not in ENDS
        if isinstance(self.targets, str) or module in self.targets or not self.layers:
            return is_named(self.targets, module)
        return is_named(self.targets, module) and self._layer_of(module) in self.layers

    def unknown_targets(self, layers: int) -> Iterator[str]:
        """A sentence for every target that a model with this many layers does not have."""
        modules = [*module_names(layers), *ENDS]
        for target in (self.targets,) if isinstance(self.targets, str) else self.targets or ():
            named = target if isinstance(self.targets, str) else (target,)
            if target == EVERY_LINEAR or any(is_named(named, module) for module in modules):
                continue
            yield (
                f"{self.path} targets '{target}', which names no module of this model; its {layers} layers have "
                f"{', '.join(PARENTS)}."
            )
        if beyond := [layer for layer in self.layers if not 0 <= layer < layers]:
            yield f"{self.path}: 'layers_to_transform' names layer {beyond[0]}, but this model has {layers} layers."

    def _layer_of(self, module: str) -> int | None:
        for pattern in self.layers_patterns or ("[^.]*",):
            # The first number is the layer: a later one would be an expert's.
            if found := re.match(rf"(?:^|.*?\.){pattern}\.(?P<layer>\d+)\.", module):
                return int(found["layer"])
        return None


def read_config(path: Path, content: bytes | None = None) -> PeftConfig:
    """Check an adapter_config.json, or what was read of it; `refusals` has what is well-formed but not supported."""
    try:
        config = ConfigFile(path, read_json(path, content))
        rank_pattern, alpha_pattern = config.section("rank_pattern"), config.section("alpha_pattern")
        read = PeftConfig(
            path=path,
            rank=config.whole("r", 8),
            alpha=config.number("lora_alpha", 8.0),
            is_rank_stabilised=config.flag("use_rslora"),
            rank_pattern={key: ConfigFile(path, rank_pattern).whole(key) for key in rank_pattern},
            alpha_pattern={key: ConfigFile(path, alpha_pattern).number(key) for key in alpha_pattern},
            targets=_texts(config, "target_modules"),
            excluded=_texts(config, "exclude_modules") or None,
            layers=_layers(config),
            layers_patterns=_listed(_texts(config, "layers_pattern") or ()),
            is_dora=config.flag("use_dora"),
            has_factor_biases=config.flag("lora_bias"),
            biases=str(config.get("bias", "none")),
            extras=extras_in(config),
            is_tying=config.flag("ensure_weight_tying"),
            own_tokens=read_own_tokens(config),
            own_modules=read_own_modules(config),
            base_model=config.get("base_model_name_or_path"),
            refusals=tuple(_refusals(config)),
        )
    except ModelError as error:
        raise AdapterError(str(error)) from error
    _check_expressions(read)
    return read


def _refusals(config: ConfigFile) -> Iterator[str]:
    kind = config.get("peft_type")
    if kind != "LORA":
        yield f"{config.path} describes a PEFT adapter of type {kind!r}; Rota serves only 'LORA'."
    yield from refused_fields(config)
    if (bias := config.get("bias", "none")) not in BIASES:
        yield f"{config.path} sets 'bias' to {bias!r}; PEFT knows {', '.join(BIASES)}."
    if config.get("use_dora") and config.get("lora_bias"):
        yield f"{config.path} sets both 'use_dora' and 'lora_bias', which PEFT does not combine."


def _pattern_for(patterns: dict[str, Any], module: str) -> str:
    """The first pattern that matches the end of the name; the name itself if none does."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module)), module)


def _texts(config: ConfigFile, name: str) -> tuple[str, ...] | str | None:
    value = config.get(name)
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ModelError(f"{config.path}: '{name}' must be a text or a list of texts, not {value!r}.")
    return tuple(value)


def _listed(texts: tuple[str, ...] | str) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else texts


def _layers(config: ConfigFile) -> tuple[int, ...]:
    value = config.get("layers_to_transform", [])
    layers = value if isinstance(value, list) else [value]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
        raise ModelError(f"{config.path}: 'layers_to_transform' must be a layer or a list of them, not {value!r}.")
    return tuple(layers)


def _check_expressions(config: PeftConfig) -> None:
    whole_names = [text for text in (config.targets, config.excluded) if isinstance(text, str)]
    for text in [*whole_names, *config.layers_patterns, *config.rank_pattern, *config.alpha_pattern]:
        try:
            re.compile(text)
        except re.error as error:
            raise AdapterError(f"{config.path}: '{text}' is no regular expression ({error}).") from error
