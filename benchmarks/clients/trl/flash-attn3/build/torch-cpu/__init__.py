"""Attention of packed rows in plain PyTorch: TRL asks for a kernel of this name, which exists for GPUs alone."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def flash_attn_varlen_func(
    q: torch.Tensor,  # [tokens, heads, width], one row behind the other
    k: torch.Tensor,  # [tokens, KV heads, width]
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,  # where each row begins, and where the last one ends
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Row i of `q` ends where row i of `k` ends: its last token sees all of them."""
    assert causal, "TRL asks for nothing else"
    assert window_size == (-1, -1), "no model of these runs has a window"
    del max_seqlen_q, max_seqlen_k  # for a kernel's launch
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    rows = []
    for row in range(len(q_ends) - 1):
        query, key, value = q[q_ends[row] : q_ends[row + 1]], *(x[k_ends[row] : k_ends[row + 1]] for x in (k, v))
        before = len(key) - len(query)
        mask = torch.ones(len(query), len(key), dtype=torch.bool, device=q.device).tril(before)
        parts = (x.transpose(0, 1)[None] for x in (query, key, value))
        seen = scaled_dot_product_attention(*parts, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
        rows.append(seen[0].transpose(0, 1))
    return torch.cat(rows)
