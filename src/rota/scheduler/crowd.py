"""A crowd is the prompts of one tenant that have begun and do not fit into its part of a step."""

from __future__ import annotations

from dataclasses import dataclass

from rota.policy.prefill_budget import Split
from rota.scheduler.sequence import Sequence


@dataclass(slots=True)
class Crowd:
    """What is planned for it in one pass."""

    split: Split[Sequence]
    left: int  # tokens of the tenant's part that are not planned yet
    overtook: int = 0  # tokens that are planned for others than the oldest prompt

    def lets_in(self, sequence: Sequence) -> bool:
        """May a waiting sequence start before its turn?"""
        return self.split.lets_in(sequence.length, sequence.priority)

    def note(self, sequence: Sequence, tokens: int) -> None:
        """This many tokens of a sequence are planned."""
        self.left = max(0, self.left - tokens)
        if sequence is not self.split.oldest:
            self.overtook += tokens

    def settle(self) -> None:
        """The pass is over: the oldest prompt has yielded to the others, if it goes on."""
        oldest = self.split.oldest
        if oldest.rest:
            oldest.yielded += self.overtook
