"""A request that was moved has tokens of two versions of its adapter."""

from __future__ import annotations

from dataclasses import dataclass

from rota.core.ids import AdapterId, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A request goes on under another version of its adapter; the first `output_tokens` tokens are the old version's.

    The KV of these tokens and of the prompt was kept, or is computed again.
    """

    request_id: RequestId
    at: float
    old: AdapterId
    new: AdapterId
    old_version: int
    new_version: int
    output_tokens: int
    kept_kv: bool = False
