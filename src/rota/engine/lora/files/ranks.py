"""Ranks and extras of adapters are read from their configs alone, before torch is there and any weight is read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rota.core.errors import AdapterError, ModelError
from rota.core.extras import Extra
from rota.core.lora_paths import LoraPath
from rota.engine.lora.files.brought import Brought
from rota.engine.lora.files.names import EMBEDDING, ENDS, EVERY_LINEAR, HEAD, is_named
from rota.engine.model.config_file import ConfigFile

# The rank of an adapter whose config was not seen: nearly all that are published have this one or a smaller one.
UNKNOWN_RANK = 64
# A config is small, and its disk or source is waited for.
THREADS = 8
# Adapters that a thread looks at in a row, at most: what lies in memory is read faster than threads take turns.
IN_A_ROW = 64
CONFIG = "adapter_config.json"
# Read at once; longer ones are rare.
USUAL_BYTES = 1 << 14


class Needs(NamedTuple):
    """What a slot must have to hold an adapter."""

    rank: int = UNKNOWN_RANK  # the largest in it
    extras: Extra = Extra.NONE
    matrices: int = 0  # an embedding or a head of its own


def needs_of(entries: Iterable[LoraPath], brought: Brought) -> list[Needs]:
    """What each of these adapters needs. Blocks on the disk, and on sources.

    A folder that cannot be read here counts as one of unknown rank without extras: if it is bad, the engine refuses it
    with the reason, and on a cluster it may lie on the engine's machine alone.
    """
    listed = list(entries)
    size = max(1, min(IN_A_ROW, len(listed) // THREADS))
    rows = [listed[at : at + size] for at in range(0, len(listed), size)]
    known: dict[bytes, Needs] = {}
    with ThreadPoolExecutor(THREADS, "adapter-needs") as pool:
        return [needs for row in pool.map(partial(_needs_of_row, brought, known), rows) for needs in row]


def _needs_of_row(brought: Brought, known: dict[bytes, Needs], entries: Sequence[LoraPath]) -> list[Needs]:
    return [_needs_of(brought, known, entry) for entry in entries]


def _needs_of(brought: Brought, known: dict[bytes, Needs], entry: LoraPath) -> Needs:
    """All from one look: each look at a source takes as long as its answers. Adapters of one recipe have one config."""
    with suppress(AdapterError, OSError, ValueError), brought.outline(entry) as place:
        content = _content(os.path.join(place.root or ".", place.path, CONFIG))
        if content not in known:
            known[content] = _needs_in(content)
        return known[content]
    return Needs()


def _content(path: str) -> bytes:
    """Without a file object, which takes five times as long."""
    file, content = os.open(path, os.O_RDONLY), b""
    try:
        while part := os.read(file, USUAL_BYTES):
            content += part
    finally:
        os.close(file)
    return content


def _needs_in(content: bytes) -> Needs:
    with suppress(ModelError, ValueError):
        values = json.loads(content)
        if isinstance(values, dict):
            config = ConfigFile(Path(CONFIG), values)
            return Needs(_rank_in(config) or UNKNOWN_RANK, _extras_of(config), _matrices_of(config))
    return Needs()


def extras_in(config: ConfigFile) -> Extra:
    """What an adapter_config.json asks for besides factors."""
    has_trims = config.get("use_dora") or config.get("lora_bias") or config.get("bias", "none") != "none"
    extras = Extra.TRIMS if has_trims else Extra.NONE
    targets = config.get("target_modules")
    if isinstance(targets, str | list) and targets != EVERY_LINEAR:
        own = read_own_modules(config)
        extras |= Extra.EMBEDDING if EMBEDDING not in own and _is_named(targets, EMBEDDING) else Extra.NONE
        extras |= Extra.HEAD if HEAD not in own and _is_named(targets, HEAD) else Extra.NONE
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


def _is_named(targets: list[Any] | str, module: str) -> bool:
    """False for what is no expression: the check of the whole config refuses it."""
    with suppress(re.error):
        return is_named(targets if isinstance(targets, str) else list(map(str, targets)), module)
    return False


def _extras_of(config: ConfigFile) -> Extra:
    with suppress(ModelError):
        return extras_in(config)
    return Extra.NONE


def _matrices_of(config: ConfigFile) -> int:
    with suppress(ModelError):
        own = {*read_own_modules(config)}
        return len(own | {HEAD} if EMBEDDING in own and config.get("ensure_weight_tying") else own)
    return 0


def _rank_in(config: ConfigFile) -> int | None:
    """The largest that an adapter_config.json names, whether a module has it or not."""
    with suppress(ModelError):
        pattern = config.section("rank_pattern")
        tokens = map(len, read_own_tokens(config).values())
        return max([config.whole("r", 8), *tokens, *(ConfigFile(config.path, pattern).whole(key) for key in pattern)])
    return None
