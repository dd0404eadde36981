"""The CPU: what it computes in hardware, and how many threads a step uses."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from rota.engine.autotune import chosen
from rota.engine.quantised.groups import GROUP
from rota.engine.quantised.matrices import Kind
from rota.machine import usable_processors

# ── processor ───────────────────────────────────────────────────────────────────────────────────────────────────────
# A Processor says what a CPU computes in hardware, as far as that decides how a model is computed.

# Sixteen rows: with one row, even emulated numbers take no longer than reading the matrix.
TRIED_ROWS, TRIED_SIZE, TRIES = 16, 512, 5
# Vector units for which torch has a 4-bit product.
WEIGHT_ONLY = ("AVX2", "AVX512")


@dataclass(frozen=True, slots=True)
class Processor:
    """What was found on this machine."""

    multiplies: frozenset[torch.dtype]  # 16-bit precisions that are faster than float32
    four_bit: Kind | None  # the 4-bit product for which it has instructions


@functools.cache
def this_processor() -> Processor:
    """What this processor computes in hardware; takes some milliseconds the first time."""
    halves = (torch.bfloat16, torch.float16)
    return Processor(frozenset(dtype for dtype in halves if _is_native(dtype)), _four_bit())


def do_without_onednn() -> None:
    """Switch oneDNN off: it refuses each product of an unsupported dtype with a page of C++, then torch computes it."""
    torch._C._set_mkldnn_enabled(False)


def slowdown(dtype: torch.dtype) -> float:
    """How many times as long a product takes as in float32."""
    return _seconds(dtype) / _seconds(torch.float32)


def _is_native(dtype: torch.dtype) -> bool:
    """Whether oneDNN supports the dtype and is faster in it: it may emulate (AVX-512 without bf16), so it is timed."""
    # Switched off, oneDNN makes float32 slow, and nothing that it is asked is true of the processor.
    if not (torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()):
        return False
    mkldnn = torch.ops.mkldnn
    knows = mkldnn._is_mkldnn_bf16_supported if dtype is torch.bfloat16 else mkldnn._is_mkldnn_fp16_supported
    return bool(knows()) and slowdown(dtype) < 1.0


def _four_bit() -> Kind | None:
    """KleidiAI packs bytes; without it torch keeps floats, and computes with one at a time."""
    outputs, inputs = GROUP, 2 * GROUP  # one group in a row would select another product
    codes = torch.zeros(outputs, inputs // 2, dtype=torch.uint8)
    scales = torch.ones(outputs, inputs // GROUP, dtype=torch.bfloat16)
    packed = torch.ops.aten._dyn_quant_pack_4bit_weight(codes, scales, None, GROUP, inputs, outputs)
    if packed.dtype is torch.uint8:
        return "dynamic"
    return "weight-only" if torch.backends.cpu.get_cpu_capability() in WEIGHT_ONLY else None


def _seconds(dtype: torch.dtype) -> float:
    x, weight = torch.ones(TRIED_ROWS, TRIED_SIZE, dtype=dtype), torch.ones(TRIED_SIZE, TRIED_SIZE, dtype=dtype)
    return quickest(lambda: functional.linear(x, weight), TRIES)


def quickest(work: Callable[[], object], tries: int) -> float:
    """The shortest of `tries` in seconds, after one that does not count: a busy machine only adds time."""
    work()
    found = []
    for _ in range(tries):
        started_at = time.perf_counter()
        work()
        found.append(time.perf_counter() - started_at)
    return min(found)


# ── threads ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Threads are chosen by the size of a step: for a small step, waking more threads costs more than they save.

# A step of up to this many tokens is small.
FEW_TOKENS = 4
# Tokens of the steps that are timed: a small step, and a larger one.
TRIED_FEW, TRIED_MANY = 1, 16
# All threads must take at most this share of one thread's time: one thread leaves the other cores free.
WORTH_IT = 0.95
# One and all are tried in turns, because a neighbour that is busy for a moment must not decide for the whole day.
# The first turn warms up, and the quickest one counts.
TURNS = 3

# (tokens, threads) -> seconds of a step.
Seconds = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Threads:
    """The number of threads for a small step, and for a larger one."""

    few: int
    many: int

    def use(self, tokens: int) -> None:
        """Set torch's threads for a step of `tokens` tokens, in this Python thread."""
        torch.set_num_threads(self.few if tokens <= FEW_TOKENS else self.many)


def choose_threads(asked: int | Literal["auto"], found: int, seconds: Seconds) -> Threads:
    """The configured number; 'auto' times one thread and all `found` threads, for both kinds of step."""
    if asked != "auto":
        return Threads(asked, asked)
    if found == 1:
        return Threads(1, 1)
    few, many = (_chosen(found, tokens, seconds) for tokens in (TRIED_FEW, TRIED_MANY))
    return Threads(few, many)


def _chosen(found: int, tokens: int, seconds: Seconds) -> int:
    name = f"threads of {found} for {tokens} tokens"
    (threads,) = chosen(name, lambda: (_quicker(found, tokens, seconds),), lambda choice: choice in ((1,), (found,)))
    return threads


def _quicker(found: int, tokens: int, seconds: Seconds) -> int:
    turns = [(seconds(tokens, found), seconds(tokens, 1)) for _ in range(TURNS)]
    with_all, with_one = (min(tried) for tried in zip(*turns, strict=True))
    return found if with_all < WORTH_IT * with_one else 1


def set_threads(replicas: int = 1) -> int:
    """Let torch use this replica's share of the processors, and return how many.

    A user's OMP_NUM_THREADS says how many there are for all replicas together.
    """
    # oneDNN keeps a thousand compiled products, and torch's layer above keeps as many descriptions. For the many prompt
    # lengths of a server that is hundreds of megabytes. 256 are enough for padded rows; with 64 a prompt's adapter
    # products took twice as long. Both libraries read the variables before their first product.
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "256")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_processors(torch.get_num_threads()))
    if replicas > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // replicas))
    return torch.get_num_threads()
