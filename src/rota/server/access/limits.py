"""Limits of a key are buckets that hold one minute's amount, and a sum of what its open answers have reserved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from rota.server.access.keys import Key

MINUTE_S = 60.0
# Far more than the rounding error of floats, and too short to matter: a client that comes back when told is served.
NO_WAIT_S = 1e-6
# Open answers end at times that are not known, so a client is asked to try again soon.
IN_FLIGHT_WAIT_S = 1


class Limit(StrEnum):
    """The limits that a call can meet before it is sent to the engine, by their names in the key file."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    IN_FLIGHT = "max_tokens_in_flight"
    QUEUE = "max_queued"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDemand:
    """The most that a call may take."""

    answers: int = 1  # one for each choice of each prompt
    prompt_tokens: int = 0
    output_tokens: int = 0  # of all answers together
    is_open_ended: bool = False  # the client set no limit, so the answers may use the rest of the context

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def tokens_under(self, limit: int) -> int:
        """The tokens to reserve. An answer without a limit of its own reserves no more than the key's limit holds."""
        return min(self.tokens, max(self.prompt_tokens, limit)) if self.is_open_ended else self.tokens


@dataclass(frozen=True, slots=True)
class Met:
    """A call has met a limit. `wait_s` is the time after which it fits, or None if it never does."""

    limit: Limit
    needed: int
    wait_s: int | None


@dataclass(frozen=True, slots=True)
class LimitUse:
    """How far a key has used up one of its limits."""

    limit: str  # as the key file calls it
    used: int
    most: int


class Bucket:
    """What a key may still spend. An answer may take more than it reserved, so the level may fall below zero."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.capacity = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        return min(float(self.capacity), self._level + (now - self._at) * self.capacity / MINUTE_S)

    def wait_s(self, needed: float, now: float) -> float:
        """How long until the bucket holds `needed`, without other spending. 0: it does now."""
        missing_s = (needed - self.level(now)) * MINUTE_S / self.capacity
        return missing_s if missing_s > NO_WAIT_S else 0.0

    def spend(self, amount: int, now: float) -> None:
        """A negative amount is given back. A full bucket takes no more."""
        self._level = min(float(self.capacity), self.level(now) - amount)
        self._at = now

    def resize(self, per_minute: int, now: float) -> None:
        """A new limit keeps the debt of the old one."""
        if per_minute != self.capacity:
            self._level, self._at = self.level(now), now
            self.capacity = per_minute


class Balance:
    """What one key may still spend, and what its open answers hold."""

    def __init__(self) -> None:
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.in_flight = 0

    def follow(self, key: Key, now: float) -> None:
        """Take over the key's limits, which may have changed since its last call."""
        self.requests = _resized(self.requests, key.requests_per_minute, now)
        self.tokens = _resized(self.tokens, key.tokens_per_minute, now)


def _resized(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if bucket is None or per_minute is None:
        return None if per_minute is None else Bucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket


class Hold:
    """What one call has reserved. It is settled once, however often its answer is closed."""

    def __init__(self, balance: Balance, in_flight: int, tokens: int) -> None:
        self._balance = balance
        # The bucket that was charged: a key's limit may go and come back while the call is open.
        self._bucket = balance.tokens
        self._in_flight = in_flight
        self._tokens = tokens
        self._is_settled = False

    def settle(self, used: int, now: float) -> None:
        """Give back what was not used. What was used beyond the reservation is charged."""
        if self._is_settled:
            return
        self._is_settled = True
        self._balance.in_flight -= self._in_flight
        if self._bucket:
            self._bucket.spend(used - self._tokens, now)


class KeyBalances:
    """The balances of all keys, made at a key's first call. Time is an argument."""

    def __init__(self) -> None:
        self._balances: dict[str, Balance] = {}

    def enter(self, key: Key, now: float) -> Met | None:
        """Count a call as one request before its body is read. An empty bucket of tokens refuses it too."""
        balance = self._balance(key, now)
        waits = {Limit.REQUESTS: _wait_s(balance.requests, 1, now), Limit.TOKENS: _wait_s(balance.tokens, 1, now)}
        if met := _longest(waits, dict.fromkeys(waits, 1)):
            return met
        if balance.requests:
            balance.requests.spend(1, now)
        return None

    def admit(self, key: Key, ask: CallDemand, now: float) -> Hold | Met:
        """Reserve what a call asks for, all of it or nothing. The call has entered, so one request is counted."""
        balance = self._balance(key, now)
        if never := _never(key, ask):
            return never
        tokens = ask.tokens_under(ask.tokens if key.tokens_per_minute is None else key.tokens_per_minute)
        in_flight = ask.tokens_under(ask.tokens if key.max_tokens_in_flight is None else key.max_tokens_in_flight)
        is_too_much = key.max_tokens_in_flight is not None and balance.in_flight + in_flight > key.max_tokens_in_flight
        waits = {
            Limit.REQUESTS: _wait_s(balance.requests, ask.answers - 1, now),
            Limit.TOKENS: _wait_s(balance.tokens, tokens, now),
            Limit.IN_FLIGHT: IN_FLIGHT_WAIT_S if is_too_much else 0.0,
        }
        needs = {Limit.REQUESTS: ask.answers, Limit.TOKENS: tokens, Limit.IN_FLIGHT: in_flight}
        if met := _longest(waits, needs):
            if balance.requests:
                balance.requests.spend(-1, now)  # a call that a limit refuses does not count
            return met
        if balance.requests:
            balance.requests.spend(ask.answers - 1, now)
        if balance.tokens:
            balance.tokens.spend(tokens, now)
        balance.in_flight += in_flight
        return Hold(balance, in_flight, tokens)

    def used(self, key: Key, now: float) -> tuple[LimitUse, ...]:
        """How far the limits of a key are used up; limits that it does not have are left out."""
        balance = self._balance(key, now)
        buckets = {Limit.REQUESTS: balance.requests, Limit.TOKENS: balance.tokens}
        spent = [
            LimitUse(name, round(one.capacity - one.level(now)), one.capacity) for name, one in buckets.items() if one
        ]
        most = key.max_tokens_in_flight
        return (*spent, *([] if most is None else [LimitUse(Limit.IN_FLIGHT, balance.in_flight, most)]))

    def charge(self, key: Key, tokens: int, now: float) -> None:
        """Count tokens that are known only afterwards."""
        if bucket := self._balance(key, now).tokens:
            bucket.spend(tokens, now)

    def _balance(self, key: Key, now: float) -> Balance:
        balance = self._balances.setdefault(key.name, Balance())
        balance.follow(key, now)
        return balance


def _never(key: Key, ask: CallDemand) -> Met | None:
    """The first limit that is smaller than the call, however long the client waits."""
    queue = None if key.max_running is None or key.max_queued is None else key.max_running + key.max_queued
    limits = {
        Limit.REQUESTS: (ask.answers, key.requests_per_minute),
        Limit.QUEUE: (ask.answers, queue),
        Limit.TOKENS: (ask.tokens_under(key.tokens_per_minute or 0), key.tokens_per_minute),
        Limit.IN_FLIGHT: (ask.tokens_under(key.max_tokens_in_flight or 0), key.max_tokens_in_flight),
    }
    for limit, (needed, most) in limits.items():
        if most is not None and needed > most:
            return Met(limit, needed, None)
    return None


def _wait_s(bucket: Bucket | None, needed: int, now: float) -> float:
    # A call of one answer needs no further request, also if another call has emptied the bucket meanwhile.
    return bucket.wait_s(needed, now) if bucket and needed else 0.0


def _longest(waits: dict[Limit, float], needs: dict[Limit, int]) -> Met | None:
    limit = max(waits, key=waits.__getitem__)
    # Rounded up and never 0, so that a client that waits this long is served.
    return Met(limit, needs[limit], max(1, math.ceil(waits[limit]))) if waits[limit] else None
