"""A PeftConfig is what an adapter_config.json says of modules: which have factors, with which rank and scale.

The file may be a tenant's, and its patterns may never end to be matched: it is read where it can be ended.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from rota.core.errors import ModelError
from rota.core.extras import Extra
from rota.engine.lora.files.fields import refused_fields
from rota.engine.lora.files.names import EMBEDDING, ENDS, EVERY_LINEAR, HEAD, is_named
from rota.engine.model.config_file import ConfigFile

BIASES = ("none", "lora_only", "all")

Value = TypeVar("Value")


class PeftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Plain facts of an adapter_config.json. Patterns have been matched with the modules of a model and of a folder."""

    place: str  # of the file
    rank: int
    alpha: float
    is_rank_stabilised: bool
    ranks: dict[str, int]  # of modules with one of their own
    alphas: dict[str, float]
    targeted: frozenset[str]  # the modules that have factors
    names_targets: bool  # else every module may have factors
    unknown_targets: tuple[str, ...]  # what names none of the model's modules
    layers: tuple[int, ...]
    is_dora: bool
    has_factor_biases: bool  # B has a bias
    biases: str  # which biases of the model are its own: none, lora_only or all
    extra: int
    is_tying: bool  # with tied embeddings the head has what the embedding has
    own_tokens: dict[str, tuple[int, ...]]  # by module at an end: the tokens that have rows of the adapter's own
    own_modules: tuple[str, ...]  # the ends that are whole matrices of the adapter's own
    base_model: str | None
    refusals: tuple[str, ...]  # why Rota cannot serve it with any model

    @property
    def path(self) -> Path:
        return Path(self.place)

    @property
    def extras(self) -> Extra:
        return Extra(self.extra)

    def changes_bias(self, module: str) -> bool:
        """Whether the adapter has its own values for a bias that the model has."""
        return self.biases == "all" or (self.biases == "lora_only" and module in self.targeted)

    def rank_of(self, module: str) -> int:
        return self.ranks.get(module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of B A."""
        rank = self.rank_of(module)
        return self.alphas.get(module, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def read_config(path: Path, values: dict[str, Any], known: Sequence[str], there: Collection[str]) -> PeftConfig:
    """Raises ModelError. `known` are the model's modules, none if any model will do; `there` are the folder's own."""
    config = ConfigFile(path, values)
    rank_pattern, alpha_pattern = config.section("rank_pattern"), config.section("alpha_pattern")
    ranks = {key: ConfigFile(path, rank_pattern).whole(key) for key in rank_pattern}
    alphas = {key: ConfigFile(path, alpha_pattern).number(key) for key in alpha_pattern}
    own_modules = read_own_modules(config)
    targets = _Targets(
        names=_texts(config, "target_modules"),
        excluded=_texts(config, "exclude_modules") or None,
        layers=_layers(config),
        layer_patterns=_listed(_texts(config, "layers_pattern") or ()),
    )
    _check_expressions(path, targets, [*ranks, *alphas])
    modules = {*known, *there}
    return PeftConfig(
        place=str(path),
        rank=config.whole("r", 8),
        alpha=config.number("lora_alpha", 8.0),
        is_rank_stabilised=config.flag("use_rslora"),
        ranks=_by_pattern(ranks, modules),
        alphas=_by_pattern(alphas, modules),
        targeted=frozenset(one for one in modules if one not in own_modules and targets.has(one)),
        names_targets=targets.names is not None,
        unknown_targets=tuple(targets.unknown(known)) if known else (),
        layers=targets.layers,
        is_dora=config.flag("use_dora"),
        has_factor_biases=config.flag("lora_bias"),
        biases=str(config.get("bias", "none")),
        extra=extras_in(config).value,
        is_tying=config.flag("ensure_weight_tying"),
        own_tokens=read_own_tokens(config),
        own_modules=own_modules,
        base_model=_text(config, "base_model_name_or_path"),
        refusals=tuple(_refusals(config)),
    )


class _Targets(NamedTuple):
    names: tuple[str, ...] | str | None
    excluded: tuple[str, ...] | str | None
    layers: tuple[int, ...]
    layer_patterns: tuple[str, ...]

    def has(self, module: str) -> bool:
        """Whether the module has factors; true for every module if the file does not name its targets."""
        if self.excluded is not None and is_named(self.excluded, module):
            return False
        if self.names is None:
            return True
        if self.names == EVERY_LINEAR:
            return module not in ENDS
        if isinstance(self.names, str) or module in self.names or not self.layers:
            return is_named(self.names, module)
        return is_named(self.names, module) and self._layer_of(module) in self.layers

    def unknown(self, modules: Sequence[str]) -> Iterator[str]:
        for target in _listed(self.names or ()):
            named = target if isinstance(self.names, str) else (target,)
            if target != EVERY_LINEAR and not any(is_named(named, module) for module in modules):
                yield target

    def _layer_of(self, module: str) -> int | None:
        for pattern in self.layer_patterns or ("[^.]*",):
            # The first number is the layer: a later one would be an expert's.
            if found := re.match(rf"(?:^|.*?\.){pattern}\.(?P<layer>\d+)\.", module):
                return int(found["layer"])
        return None


def _by_pattern(values: Mapping[str, Value], modules: Collection[str]) -> dict[str, Value]:
    """By module, what stands at the first pattern that matches the end of its name."""
    patterns = [(re.compile(rf"(.*\.)?({pattern})$"), value) for pattern, value in values.items()]
    found = {module: next((value for one, value in patterns if one.match(module)), None) for module in modules}
    return {module: value for module, value in found.items() if value is not None}


def extras_in(config: ConfigFile) -> Extra:
    """What an adapter_config.json asks for besides factors. Raises re.error for a target that is no expression."""
    has_trims = config.get("use_dora") or config.get("lora_bias") or config.get("bias", "none") != "none"
    extras = Extra.TRIMS if has_trims else Extra.NONE
    targets = config.get("target_modules")
    if isinstance(targets, str | list) and targets != EVERY_LINEAR:
        named = targets if isinstance(targets, str) else list(map(str, targets))
        own = read_own_modules(config)
        extras |= Extra.EMBEDDING if EMBEDDING not in own and is_named(named, EMBEDDING) else Extra.NONE
        extras |= Extra.HEAD if HEAD not in own and is_named(named, HEAD) else Extra.NONE
    if Extra.EMBEDDING in extras and config.get("ensure_weight_tying"):
        extras |= Extra.HEAD
    if read_own_tokens(config):
        extras |= Extra.EMBEDDING | Extra.HEAD  # whether they are tied, the config does not say
    return extras


def read_own_tokens(config: ConfigFile) -> dict[str, tuple[int, ...]]:
    """By module, the tokens for which an adapter has rows of its own; a bare list means the embedding."""
    value = config.get("trainable_token_indices", {})
    named = value if isinstance(value, dict) else {"embed_tokens": value}
    return {_end(config, name): _tokens(config, tokens) for name, tokens in named.items()}


def read_own_modules(config: ConfigFile) -> tuple[str, ...]:
    """The ends that are whole matrices of an adapter's own. With `ensure_weight_tying` PEFT saves a tied head too."""
    value = config.get("modules_to_save", [])
    named = value if isinstance(value, list) else [value]
    for name in named:
        if not isinstance(name, str) or not any(module.endswith(name) for module in ENDS):
            raise ModelError(
                f"{config.path}: 'modules_to_save' names {name!r}; Rota serves weights of an adapter's own for "
                f"{' and '.join(ENDS)} alone."
            )
    return tuple(module for module in ENDS if any(module.endswith(name) for name in named))


def _end(config: ConfigFile, name: str) -> str:
    for module in ENDS:
        if is_named([name], module):
            return module
    raise ModelError(f"{config.path}: 'trainable_token_indices' names '{name}'; Rota knows {', '.join(ENDS)}.")


def _tokens(config: ConfigFile, tokens: Any) -> tuple[int, ...]:
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        raise ModelError(f"{config.path}: 'trainable_token_indices' must have lists of token numbers, not {tokens!r}.")
    if len(set(tokens)) < len(tokens):
        raise ModelError(f"{config.path}: 'trainable_token_indices' names a token twice.")
    return tuple(tokens)


def _refusals(config: ConfigFile) -> Iterator[str]:
    kind = config.get("peft_type")
    if kind != "LORA":
        yield f"{config.path} describes a PEFT adapter of type {kind!r}; Rota serves only 'LORA'."
    yield from refused_fields(config)
    if (bias := config.get("bias", "none")) not in BIASES:
        yield f"{config.path} sets 'bias' to {bias!r}; PEFT knows {', '.join(BIASES)}."
    if config.get("use_dora") and config.get("lora_bias"):
        yield f"{config.path} sets both 'use_dora' and 'lora_bias', which PEFT does not combine."


def _text(config: ConfigFile, name: str) -> str | None:
    value = config.get(name)
    return value if value is None else str(value)


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


def _check_expressions(path: Path, targets: _Targets, patterns: Sequence[str]) -> None:
    whole_names = [text for text in (targets.names, targets.excluded) if isinstance(text, str)]
    for text in [*whole_names, *targets.layer_patterns, *patterns]:
        try:
            re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise ModelError(f"{path}: '{text[:200]}' is no regular expression ({error}).") from error
