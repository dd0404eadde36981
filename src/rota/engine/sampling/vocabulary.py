"""The vocabulary is cut over the ranks: each computes the logits of its own tokens.

A greedy row needs only each rank's best token and its logit. Rows that sample, and tokens that are scored, need all
logits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rota.core.plan import NO_TOKEN
from rota.engine.parallel.group import ONE_RANK, RankGroup
from rota.engine.parallel.shard import WHOLE, Shard
from rota.engine.sampling.draw import argmax, mask_nan_rows


class RankVocabulary:
    """All tokens, and those of this rank."""

    def __init__(self, size: int, group: RankGroup = ONE_RANK, shard: Shard = WHOLE) -> None:
        self.size = size
        self._group = group
        cut = shard.tokens(size)
        self._first = cut.first
        self.own = cut.end - cut.first  # tokens of this rank
        self._most = Shard(0, shard.size).tokens(size).end  # tokens of the rank with most

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[n] the likeliest tokens, the first of equals; and the same with NO_TOKEN where logits are not numbers.

        logits [n, this rank's tokens].
        """
        tokens = argmax(logits)
        if self._group.size == 1:
            return tokens, mask_nan_rows(tokens, logits)
        values = logits.gather(1, tokens[:, None])
        # A float32 counts exactly up to 2**24, more than any vocabulary.
        pairs = self._group.gather(torch.cat((values.float(), (tokens + self._first).float()[:, None]), 1))
        # The first of equals is the lowest rank's, whose tokens have the lowest numbers. NaN counts as largest.
        best = pairs[:, :, :1].argmax(0, keepdim=True).expand(1, -1, 2)
        value, token = pairs.gather(0, best)[0].unbind(1)
        tokens = token.to(torch.int64)
        return tokens, tokens.masked_fill(value - value != 0.0, NO_TOKEN)

    def whole(self, logits: Tensor) -> Tensor:
        """[n, this rank's tokens] -> [n, all tokens]; a rank without its group takes other tokens for impossible."""
        if self.own == self.size:
            return logits
        if self._group.size == 1:
            return functional.pad(logits, (self._first, self.size - self._first - self.own), value=-torch.inf)
        gathered = self._group.gather(functional.pad(logits, (0, self._most - self.own)))
        return gathered.transpose(0, 1).flatten(1)[:, : self.size]
