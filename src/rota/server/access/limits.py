"""Limits per minute are token buckets: one for every key and kind, which holds one minute's amount."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rota.server.access.keys import Key

MINUTE_S = 60.0
# Far more than the rounding error of floats, and too short to matter: a client that comes back when told is served.
NO_WAIT_S = 1e-6


class Bucket:
    """What a key may still spend. An answer is charged at its end, so the level may fall below zero."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._rate = per_minute / MINUTE_S
        self._capacity = float(per_minute)
        self._level = self._capacity
        self._at = now

    def wait_s(self, needed: float, now: float) -> float:
        """How long until the bucket holds `needed`, without other spending. 0: it does now."""
        missing_s = (needed - self._level_at(now)) / self._rate
        return missing_s if missing_s > NO_WAIT_S else 0.0

    def spend(self, amount: float, now: float) -> None:
        self._level = self._level_at(now) - amount
        self._at = now

    def _level_at(self, now: float) -> float:
        return min(self._capacity, self._level + (now - self._at) * self._rate)


@dataclass(slots=True)
class _Account:
    requests: Bucket | None
    tokens: Bucket | None


class Limits:
    """The buckets of all keys, made at a key's first request. Time is an argument."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def spend_request(self, key: Key, now: float) -> int:
        """Count a request and return 0, or return the whole seconds to wait."""
        account = self._account(key, now)
        waits = [bucket.wait_s(1.0, now) for bucket in (account.requests, account.tokens) if bucket]
        if any(waits):
            # Rounded up and never 0, so that a client that waits this long is served.
            return max(1, math.ceil(max(waits)))
        if account.requests:
            account.requests.spend(1.0, now)
        return 0

    def spend_tokens(self, key: Key, tokens: int, now: float) -> None:
        if bucket := self._account(key, now).tokens:
            bucket.spend(tokens, now)

    def _account(self, key: Key, now: float) -> _Account:
        account = self._accounts.get(key.name)
        if account is None:
            limits = (key.requests_per_minute, key.tokens_per_minute)
            account = _Account(*(None if limit is None else Bucket(limit, now) for limit in limits))
            self._accounts[key.name] = account
        return account
