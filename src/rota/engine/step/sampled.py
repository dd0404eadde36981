"""What a step gave to the rows that sample: tokens, and how likely they were."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities under the model's own distribution, before penalties, temperature and filters."""

    chosen: Tensor  # [n] float32
    top_tokens: Tensor  # [n, most] int64, best first
    top: Tensor  # [n, most] float32
    wanted: tuple[tuple[int, int], ...]  # position among the n, and how many of the top tokens it asked for


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step's rows got."""

    tokens: Tensor  # [n] int64
    logprobs: Logprobs | None = None
    scores: Logprobs | None = None  # of prompts' tokens
    pooled: Tensor | None = None  # [pools, hidden size] float32
    is_stuck: Tensor | None = None  # [n] bool: what its request says leaves no token
