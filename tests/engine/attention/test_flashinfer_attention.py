"""Prompts through FlashInfer against softmax in float64: the real one where it and a GPU are, else a stand-in for it.

The stand-in takes what FlashInfer's documentation says its wrapper takes, and is as strict about it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rota.core.errors import ConfigError
from tests.engine.attention.paged import attend, decode_step, paged_cache, prefill_step
from tests.engine.nearness import relative_error
from tests.engine.triton_interpreter import DEVICE, load

flashinfer_attention = load("rota.engine.attention.flashinfer_attention")
HAS_FLASHINFER = DEVICE == "cuda" and find_spec("flashinfer") is not None
CHUNKS = [(0, 0, 40), (1, 0, 3), (2, 101, 29), (3, 0, 1), (4, 31, 20)]
SCALE = 64**-0.5


class StandIn:
    """BatchPrefillWithPagedKVCacheWrapper, one sequence after the other."""

    made: list[StandIn] = []  # noqa: RUF012

    def __init__(self, workspace: Tensor, kv_layout: str = "NHD") -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "HND"
        self.plans = 0
        StandIn.made.append(self)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int = -1,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        assert q_data_type == kv_data_type
        for numbers in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert numbers.dtype == torch.int32
        for on_the_host in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len):
            assert on_the_host.device.type == "cpu"
        assert paged_kv_indices.shape == (paged_kv_indptr[-1],)
        self.plans += 1
        self.group = num_qo_heads // num_kv_heads
        self.shape = (num_kv_heads, page_size, head_dim_qk)
        self.scale = sm_scale
        self.window_left = window_left
        self.queries = list(pairwise(qo_indptr.tolist()))
        indices = paged_kv_indices.tolist()
        self.pages = [
            indices[a:b] for a, b in zip(paged_kv_indptr.tolist(), paged_kv_indptr.tolist()[1:], strict=False)
        ]
        self.last = paged_kv_last_page_len.tolist()

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv_cache
        assert keys.shape[1:] == values.shape[1:] == self.shape
        output = torch.empty_like(q)
        for (begin, end), pages, last in zip(self.queries, self.pages, self.last, strict=True):
            length = (len(pages) - 1) * self.shape[1] + last
            k, v = (self._dense(cache[pages], length) for cache in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), k) * self.scale
            hidden = torch.ones(end - begin, length).triu(length - (end - begin) + 1).bool()
            if self.window_left >= 0:
                hidden |= torch.ones(end - begin, length).tril(length - (end - begin) - self.window_left - 1).bool()
            weights = scores.masked_fill(hidden.to(q.device), -torch.inf).softmax(-1)
            output[begin:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
        return output

    def _dense(self, pages: Tensor, length: int) -> Tensor:
        tokens = pages.transpose(1, 2).flatten(0, 1)[:length]  # [tokens, kv_heads, head_dim]
        return tokens.double().repeat_interleave(self.group, 1)


@pytest.fixture(autouse=True)
def installed(monkeypatch) -> None:
    torch.manual_seed(0)
    StandIn.made = []
    if not HAS_FLASHINFER:
        stand_in: Any = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=StandIn)
        monkeypatch.setitem(sys.modules, "flashinfer", stand_in)


def new_attention() -> Any:
    return flashinfer_attention.FlashInferAttention(64**-0.5, 64, torch.bfloat16, torch.device(DEVICE))


@pytest.mark.parametrize("window", [0, 1, 25])
@pytest.mark.parametrize(("kv_heads", "group", "block_size"), [(2, 4, 16), (1, 1, 8)])
def test_chunks_attend_to_their_cached_prefix_and_causally_to_themselves(kv_heads, group, block_size, window):
    cache = paged_cache([40, 3, 130, 1, 77], kv_heads, 64, block_size, torch.bfloat16, DEVICE)
    query = torch.randn(sum(tokens for _, _, tokens in CHUNKS), kv_heads * group, 64).bfloat16().to(DEVICE)

    found = new_attention().prefill(query, cache.layer, prefill_step(cache, CHUNKS), window)

    begin = 0
    for row, start, tokens in CHUNKS:
        expected = attend(query[begin : begin + tokens], cache, row, start, SCALE, window)
        assert relative_error(found[begin : begin + tokens], expected) < 1e-2
        begin += tokens


def test_layers_share_a_step_s_plan_and_steps_take_turns_with_planners():
    cache = paged_cache([40, 9], 2, 64, 16, torch.bfloat16, DEVICE)
    query = torch.randn(40, 4, 64).bfloat16().to(DEVICE)
    attention = new_attention()
    steps = [prefill_step(cache, [(0, 0, 40)]) for _ in range(3)]
    found = [attention.prefill(query, cache.layer, step) for step in steps for _ in range(4)]

    assert all(torch.equal(found[0], one) for one in found)
    if not HAS_FLASHINFER:
        assert [planner.plans for planner in StandIn.made] == [2, 1]


def test_layers_of_another_window_have_a_plan_of_their_own():
    cache = paged_cache([40, 9], 2, 64, 16, torch.bfloat16, DEVICE)
    query = torch.randn(40, 4, 64).bfloat16().to(DEVICE)
    attention, step = new_attention(), prefill_step(cache, [(0, 0, 40)])
    found = [attention.prefill(query, cache.layer, step, window) for window in (0, 5, 0, 5)]

    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert relative_error(found[3], attend(query, cache, 0, 0, SCALE, 5)) < 1e-2
    if not HAS_FLASHINFER:
        assert [planner.plans for planner in StandIn.made] == [1, 0, 1, 0]


def test_a_step_that_the_host_knows_nothing_of_and_decodes_are_triton_s():
    cache = paged_cache([40, 9], 2, 64, 16, torch.float32, DEVICE)
    query = torch.randn(40, 4, 64).to(DEVICE)
    step = prefill_step(cache, [(0, 0, 40)])
    assert step.prefill is not None
    in_a_graph = replace(step, prefill=replace(step.prefill, host_rows=(), host_starts=(), host_lengths=()))
    attention = new_attention()

    framed = attention.prefill(query, cache.layer, in_a_graph)
    decoded = attention.decode(query[:2], cache.layer, decode_step(cache, [0, 1]))

    assert relative_error(framed, attend(query, cache, 0, 0, SCALE)) < 1e-5
    assert relative_error(decoded[1:], attend(query[1:2], cache, 1, 8, SCALE)) < 1e-5
    assert all(planner.plans == 0 for planner in StandIn.made)


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float32), (80, torch.bfloat16)])
def test_what_it_has_no_kernels_for_is_refused_at_the_start(head_dim, dtype):
    with pytest.raises(ConfigError, match=f"heads of {head_dim} numbers in {dtype}.*--attention-backend triton"):
        flashinfer_attention.FlashInferAttention(0.125, head_dim, dtype, torch.device(DEVICE))
