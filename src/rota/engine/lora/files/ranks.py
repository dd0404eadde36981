"""Ranks and extras of adapters are read from their configs alone, before torch is there and any weight is read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rota.core.adapter import Extra
from rota.core.errors import AdapterError, ModelError
from rota.core.lora_paths import LoraPath
from rota.engine.lora.files.brought import Brought
from rota.engine.lora.files.outline import LONGEST_CONFIG, Inquire, Outline, OutlineOf, answer, answered, parsed
from rota.engine.lora.files.peft_config import EMBEDDING, HEAD, extras_in, read_own_modules, read_own_tokens
from rota.engine.model.config_file import ConfigFile

# ── pages ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# A page is room for eight ranks of one adapter: where ranks differ, slots share pages, and each takes what it needs.
#
#     pages     | 0      | 1      | 2      | 3      | 4      |
#                slot 1   slot 0   slot 1            slot 1        slot 0 has rank 8, slot 1 has rank 20
#     table     slot 0: 1          slot 1: 0 2 4
#
# Rank n of a slot is rank n % 8 of page `table[slot, n // 8]`. The scheduler's ledger gives pages as it gives KV
# blocks.

# Eight numbers of two bytes: every page begins at a multiple of 16 bytes, in any precision that a GPU computes in.
PAGE_RANK = 8


def pages_for(rank: int) -> int:
    """How many pages an adapter of this rank takes."""
    return -(-rank // PAGE_RANK)


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


def needs_of(entries: Iterable[LoraPath], brought: Brought, ask: Inquire = answer) -> list[Needs]:
    """What each of these adapters needs. Blocks on the disk, and on sources; patterns are matched by `ask`.

    A folder that cannot be read here counts as one of unknown rank without extras: if it is bad, the engine refuses it
    with the reason, and on a cluster it may lie on the engine's machine alone.
    """
    listed = list(entries)
    size = max(1, min(IN_A_ROW, len(listed) // THREADS))
    rows = [listed[at : at + size] for at in range(0, len(listed), size)]
    known: dict[bytes, Needs] = {}
    with ThreadPoolExecutor(THREADS, "adapter-needs") as pool:
        found = pool.map(lambda row: [_needs_of(brought, ask, known, entry) for entry in row], rows)
        return [needs for row in found for needs in row]


def _needs_of(brought: Brought, ask: Inquire, known: dict[bytes, Needs], entry: LoraPath) -> Needs:
    """All from one look: each look at a source takes as long as its answers. Adapters of one recipe have one config."""
    with suppress(AdapterError, OSError, ValueError, RuntimeError), brought.place_of(entry, is_outline=True) as place:
        content = _content(os.path.join(place.root or ".", place.path, CONFIG))
        if content not in known:
            known[content] = _needs_in(content, ask)
        return known[content]
    return Needs()


def _content(path: str) -> bytes:
    """Without a file object, which takes five times as long."""
    file, content = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), b""
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return b""  # a pipe would be waited for
        while len(content) <= LONGEST_CONFIG and (part := os.read(file, USUAL_BYTES)):
            content += part
    finally:
        os.close(file)
    return content if len(content) <= LONGEST_CONFIG else b""


def _needs_in(content: bytes, ask: Inquire) -> Needs:
    with suppress(ModelError):
        config = ConfigFile(Path(CONFIG), parsed(CONFIG, content))
        return Needs(_rank_in(config) or UNKNOWN_RANK, _extras_of(config, content, ask), _matrices_of(config))
    return Needs()


def _extras_of(config: ConfigFile, content: bytes, ask: Inquire) -> Extra:
    with suppress(ModelError):
        if isinstance(config.get("target_modules"), str):
            # A pattern, which may be a tenant's. What is no expression, the check of the whole config refuses.
            found = answered(ask, OutlineOf(CONFIG, content, (), ()))
            return found.config.extras if isinstance(found, Outline) else Extra.NONE
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
