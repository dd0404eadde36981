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

from rota.core.adapter import Extra
from rota.core.errors import ModelError
from rota.engine.model.config_file import ConfigFile

# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Names of modules as PEFT matches them, and the modules at the model's ends.

EVERY_LINEAR = "all-linear"
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
END_MODULES = (EMBEDDING, HEAD)


def is_named(targets: Sequence[str] | str, module: str) -> bool:
    """As in PEFT: a string is a regular expression for the whole name, a list has names or ends of names."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return module in targets or any(module.endswith(f".{target}") for target in targets)


# ── fields ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Every field of an adapter_config.json is read, or makes no difference once trained, or refuses the adapter.
#
# A field that is null, false or empty is not set. What PEFT adds in a later release is refused by its name as soon as
# an adapter sets it, because it may change what is computed.

READ = frozenset((
    "peft_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "use_dora", "lora_bias", "bias",
    "ensure_weight_tying", "trainable_token_indices", "modules_to_save", "init_lora_weights",
))  # fmt: skip
# How an adapter was trained, and for what. PEFT sets fan_in_fan_out aside for the matrices of these models.
NO_MATTER = frozenset((
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "fan_in_fan_out",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "runtime_config",
    "qalora_group_size",
))  # fmt: skip
# What an adapter has that sets one of these.
REFUSED = {
    "target_parameters": "factors on bare parameters",
    "layer_replication": "repeated layers",
    "megatron_config": "factors of Megatron's parallel layers",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
PLAIN_STARTS = ("gaussian", "orthogonal", "eva", "mica")
# Initialisations that change the base weights, so that the factors alone are not the fine-tune.
CONVERTIBLE_STARTS = ("pissa", "corda", "olora", "lora_ga")
QUANTISED_START = "loftq"


def refused_fields(config: ConfigFile) -> Iterator[str]:
    """A sentence for each field that makes an adapter another than factors on top of the model."""
    for name, value in config.values.items():
        if not value or name in READ or name in NO_MATTER:
            continue
        if name in REFUSED:
            yield f"{config.path} sets '{name}': the adapter has {REFUSED[name]}, which Rota does not serve."
        else:
            yield (
                f"{config.path} sets '{name}' to {_shown(value)}, a field that Rota does not know. It may change what "
                "the adapter computes; if it does not, remove it from the file."
            )
    yield from _refused_start(config)


def _refused_start(config: ConfigFile) -> Iterator[str]:
    start = config.get("init_lora_weights", True)
    if isinstance(start, bool) or start in PLAIN_STARTS:
        return
    kind, sets = str(start).lower(), f"{config.path} sets 'init_lora_weights' to {_shown(start)}"
    if kind.startswith(CONVERTIBLE_STARTS):
        yield (
            f"{sets}, which also changed the base weights; convert the adapter with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=…)."
        )
    elif kind == QUANTISED_START:
        yield (
            f"{sets}, which also changed the base weights, and PEFT cannot convert that. Save the base model it was "
            "trained on, set the field to true, and serve both together."
        )
    else:
        yield f"{sets}, which Rota does not know; it may have changed the base weights."


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


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
            return module not in END_MODULES
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
    has_gain_bias = config.get("use_dora") or config.get("lora_bias") or config.get("bias", "none") != "none"
    extras = Extra.GAIN_BIAS if has_gain_bias else Extra.NONE
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
        if not isinstance(name, str) or not any(module.endswith(name) for module in END_MODULES):
            raise ModelError(
                f"{config.path}: 'modules_to_save' names {name!r}; Rota serves weights of an adapter's own for "
                f"{' and '.join(END_MODULES)} alone."
            )
    return tuple(module for module in END_MODULES if any(module.endswith(name) for name in named))


def _end(config: ConfigFile, name: str) -> str:
    for module in END_MODULES:
        if is_named([name], module):
            return module
    raise ModelError(f"{config.path}: 'trainable_token_indices' names '{name}'; Rota knows {', '.join(END_MODULES)}.")


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
