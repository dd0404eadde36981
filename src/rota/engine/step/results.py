"""What a step gave: hidden states of the rows that sample, their tokens, and the copy of these to the host."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
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
# What a step gave to the rows that sample: tokens, and how likely they were.


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


# ── copied ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# A step's results are copied to the host while no thread waits.


@dataclass(frozen=True, slots=True)
class Copied:
    """Tensors on the host that may be read once `done` has passed; without it they were ready from the start."""

    tokens: Tensor  # [n] int64
    logprobs: Logprobs | None
    scores: Logprobs | None
    pooled: Tensor | None  # [pools, hidden size] float32
    done: torch.Event | None

    def wait(self) -> StepResult:
        """Blocks until the step is done, and for no step after it."""
        if self.done is not None:
            self.done.synchronize()
        scores = tuple(score for _, score in _token_logprobs(self.scores))
        return StepResult(
            at=time.monotonic(),
            tokens=tuple(self.tokens.tolist()),
            logprobs=_token_logprobs(self.logprobs),
            scores=scores,
            pooled=tuple(map(tuple, self.pooled.tolist())) if self.pooled is not None else (),
        )


def copy_to_host(sampled: Sampled, device: torch.device) -> Copied:
    """Queue the copies to the host behind the step that is being computed."""
    tokens, logprobs, scores = fetch(sampled.tokens), _fetched(sampled.logprobs), _fetched(sampled.scores)
    pooled = fetch(sampled.pooled) if sampled.pooled is not None else None
    done = None
    if device.type == "cuda":
        done = torch.Event(device)
        done.record()
    return Copied(tokens, logprobs, scores, pooled, done)


def _fetched(logprobs: Logprobs | None) -> Logprobs | None:
    if logprobs is None:
        return None
    return Logprobs(fetch(logprobs.chosen), fetch(logprobs.top_tokens), fetch(logprobs.top), logprobs.wanted)


def _token_logprobs(logprobs: Logprobs | None) -> tuple[tuple[int, TokenLogprobs], ...]:
    if logprobs is None:
        return ()
    chosen, tokens, top = logprobs.chosen.tolist(), logprobs.top_tokens.tolist(), logprobs.top.tolist()
    return tuple(
        (at, TokenLogprobs(chosen[at], tuple(zip(tokens[at][:count], top[at][:count], strict=True))))
        for at, count in logprobs.wanted
    )
