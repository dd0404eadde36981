"""What a forward pass gave for the rows that a frame samples for, padding's among them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Computed:
    """Greedy tokens, and the logits that others are drawn from."""

    tokens: Tensor  # [sampled] int64, NO_TOKEN where logits are not numbers
    logits: Tensor  # [sampled, this rank's tokens]
    rows: Tensor  # [sampled]
    lengths: Tensor  # [sampled] how many tokens each row knows
    hidden: Tensor | None  # [tokens, hidden size]; a graph keeps none, for each would keep its own
