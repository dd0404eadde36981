"""FlashInferAttention lets FlashInfer's kernels attend for prompts, if FlashInfer is installed.

FlashInfer plans a step on the host, from lengths that a captured graph must not ask for. So steps in graphs go to our
own kernels, and so do all decodes: what remains are the steps with the longest prompts, where attention weighs most.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rota.core.errors import ConfigError
from rota.engine.attention.triton_attention import TritonAttention
from rota.engine.layer_cache import LayerCache
from rota.engine.step.device_step import DeviceStep, PrefillPart, int32

HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 << 20
# The next plan overwrites a plan's host memory: with one plan for each step under way, no step waits for it.
PLANNERS = 2


@dataclass(slots=True)
class _Planner:
    """FlashInfer's wrapper, and the moment from which its plan's host memory may be written again."""

    wrapper: Any
    is_copied: torch.cuda.Event | None = None


class FlashInferAttention:
    """Paged attention for GPUs. The newest step is known by identity, so its tensors must not change under way."""

    def __init__(self, scale: float, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ConfigError for what FlashInfer has no kernels for."""
        import flashinfer  # here, since it need not be installed

        if head_dim not in HEAD_DIMS or dtype.itemsize != 2:
            raise ConfigError(
                f"attention_backend is 'flashinfer', which has no kernels for heads of {head_dim} numbers in {dtype}, "
                f"but for {', '.join(map(str, HEAD_DIMS))} in bfloat16 and float16; use --attention-backend triton."
            )
        self._scale, self._triton = scale, TritonAttention(scale)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._new_planner = lambda: _Planner(wrapper(workspace, "HND"))
        self._planners: dict[int, Iterator[_Planner]] = {}  # by window
        self._step: DeviceStep | None = None
        self._planned: dict[int, Any] = {}  # by window

    def decode(self, query: Tensor, cache: LayerCache, step: DeviceStep, window: int = 0) -> Tensor:
        return self._triton.decode(query, cache, step, window)

    def prefill(self, query: Tensor, cache: LayerCache, step: DeviceStep, window: int = 0) -> Tensor:
        assert step.prefill is not None
        if not step.prefill.host_lengths:
            return self._triton.prefill(query, cache, step, window)
        if self._step is not step:
            self._step, self._planned = step, {}
        if window not in self._planned:
            self._planned[window] = self._plan(query, cache.keys, step.tables, step.prefill, window)
        attended: Tensor = self._planned[window].run(query, (cache.keys, cache.values))
        return attended

    def _plan(self, query: Tensor, keys: Tensor, tables: Tensor, part: PrefillPart, window: int) -> Any:
        """What layers of one window share. Numbers that the host knows stay there, so that nothing waits for them."""
        if window not in self._planners:
            self._planners[window] = itertools.cycle([self._new_planner() for _ in range(PLANNERS)])
        planner = next(self._planners[window])
        if planner.is_copied is not None:
            planner.is_copied.synchronize()
        _, kv_heads, block_size, head_dim = keys.shape
        lengths = [start + tokens for start, tokens in zip(part.host_starts, part.host_lengths, strict=True)]
        pages = [-(-length // block_size) for length in lengths]
        planner.wrapper.plan(
            _borders(part.host_lengths),
            _borders(pages),
            torch.cat([tables[row, :count] for row, count in zip(part.host_rows, pages, strict=True)]),
            int32([(length - 1) % block_size + 1 for length in lengths]),
            query.shape[1],
            kv_heads,
            head_dim,
            block_size,
            causal=True,
            sm_scale=self._scale,
            window_left=window - 1,  # FlashInfer does not count the query's own token; -1: no window
            q_data_type=query.dtype,
            kv_data_type=keys.dtype,
        )
        if query.device.type == "cuda":
            planner.is_copied = torch.cuda.Event()
            planner.is_copied.record()
        return planner.wrapper


def _borders(lengths: list[int] | tuple[int, ...]) -> Tensor:
    """Where each begins when they lie one after the other, and the end of all."""
    return int32(list(itertools.accumulate(lengths, initial=0)))
