"""What a step gave: hidden states and logits of the rows that sample, then what was drawn for them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from rota.core.plan import StepResult, TokenLogprobs
from rota.engine.device import fetch

# ── computed ────────────────────────────────────────────────────────────────────────────────────────────────────────
# What a forward pass gave for the rows that a frame samples for, padding's among them.


@dataclass(frozen=True, slots=True)
class Computed:
    """Greedy tokens, and the logits that others are drawn from."""

    tokens: Tensor  # [sampled] int64, NO_TOKEN where logits are not numbers
    logits: Tensor  # [sampled, this rank's tokens]
    rows: Tensor  # [sampled]
    lengths: Tensor  # [sampled] how many tokens each row knows
    hidden: Tensor | None  # [tokens, hidden size]; a graph keeps none, for each would keep its own


# ── sampled ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# What a step gave to the rows that sample: tokens, and how likely they were; on the device, then on the host.


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities under the model's own distribution, before penalties, temperature and filters."""

    chosen: Tensor  # [n] float32
    top_tokens: Tensor  # [n, most] int64, best first
    top: Tensor  # [n, most] float32
    wanted: tuple[tuple[int, int], ...]  # position among the n, and how many of the top tokens it asked for

    def on_host(self) -> Logprobs:
        return Logprobs(fetch(self.chosen), fetch(self.top_tokens), fetch(self.top), self.wanted)

    def by_position(self) -> tuple[tuple[int, TokenLogprobs], ...]:
        chosen, tokens, top = self.chosen.tolist(), self.top_tokens.tolist(), self.top.tolist()
        return tuple(
            (at, TokenLogprobs(chosen[at], tuple(zip(tokens[at][:count], top[at][:count], strict=True))))
            for at, count in self.wanted
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step's rows got."""

    tokens: Tensor  # [n] int64
    logprobs: Logprobs | None = None
    scores: Logprobs | None = None  # of prompts' tokens
    pooled: Tensor | None = None  # [pools, hidden size] float32
    is_stuck: Tensor | None = None  # [n] bool: what its request says leaves no token

    def on_host(self) -> Sampled:
        """Copies to the host, queued behind the step: an event recorded behind this call says when they are there."""
        return Sampled(
            fetch(self.tokens),
            self.logprobs.on_host() if self.logprobs is not None else None,
            self.scores.on_host() if self.scores is not None else None,
            fetch(self.pooled) if self.pooled is not None else None,
        )

    def as_result(self) -> StepResult:
        """Of copies that are on the host, now."""
        return StepResult(
            at=time.monotonic(),
            tokens=tuple(self.tokens.tolist()),
            logprobs=self.logprobs.by_position() if self.logprobs is not None else (),
            scores=tuple(score for _, score in self.scores.by_position()) if self.scores is not None else (),
            pooled=tuple(map(tuple, self.pooled.tolist())) if self.pooled is not None else (),
        )
