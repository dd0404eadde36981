"""An outlook says how near an adapter that has work and no slot is to a slot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outlook:
    """Settled adapters come back by themselves; others have `ahead` absent adapters before them."""

    ahead: int = 0
    is_settled: bool = False

    def sentence(self, is_counted: bool = True) -> str:
        """`is_counted`: may the reader know how many other adapters wait?"""
        if self.is_settled:
            return "its adapter is settled and comes back when a visit is over"
        if not self.ahead:
            return "its adapter is next in line"
        others = f"{self.ahead} other{'s' if self.ahead > 1 else ''}" if is_counted else "others"
        return f"its adapter waits behind {others}"
