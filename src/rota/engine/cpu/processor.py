"""A Processor says what a CPU computes in hardware, as far as that decides how a model is computed."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from rota.engine.quantised.groups import GROUP
from rota.engine.quantised.matrices import Kind

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
