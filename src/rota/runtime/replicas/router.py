"""The router chooses a replica for each request, by what messages and events tell of the replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import CacheFlushed, EngineRestarted, Event, Finished
from rota.core.ids import BASE, RequestId
from rota.core.request import Request
from rota.policy.routing import Prices, RouteReason, RoutingChoice
from rota.runtime.replicas.replica_state import FIRST_FETCH_S, FIRST_LOAD_S, SHARE, Columns, Mean, Pace, ReplicaBooks

# ── prefix index ────────────────────────────────────────────────────────────────────────────────────────────────────
# The prefix index remembers which replica has seen the beginning of which prompt, in bounded memory and time.

# Where beginnings end, in tokens: a prompt is known by at most so many of them, and hashed no further than the last.
ENDS = (64, 128, 256, 512, 1024, 2048)
MOST_BEGINNINGS = 16_384


class PrefixIndex:
    """Beginnings by hash; those that were not asked for longest are forgotten first.

    An entry is a number with one bit for each replica. Adapters and cache scopes share no KV, so they share no entry.
    """

    def __init__(self, most: int = MOST_BEGINNINGS) -> None:
        self._most = most
        self._seen: dict[int, int] = {}  # the longest unused first

    def __len__(self) -> int:
        return len(self._seen)

    def keys_of(self, request: Request) -> list[int]:
        """The beginnings of a prompt, the shortest first."""
        prompt, begin = request.prompt, 0
        key = hash((request.adapter_id, request.cache_scope))
        keys: list[int] = []
        for end in ENDS:
            if end > len(prompt):
                break
            key = hash((key, prompt[begin:end]))
            keys.append(key)
            begin = end
        return keys

    def seen(self, keys: list[int], replicas: int) -> NDArray[np.float64] | None:
        """How many tokens of a prompt with these beginnings each of so many replicas has seen; None: none of them."""
        chain: list[int] = []
        for key in keys:
            if not (holders := self._seen.get(key)):
                break
            chain.append(holders)
        if not chain:
            return None
        found, done = np.zeros(replicas), 0
        for end, holders in zip(ENDS[len(chain) - 1 :: -1], reversed(chain), strict=True):
            if left := holders & ~done:  # mostly none: who has seen a beginning has seen all shorter ones
                found[_places(left, replicas)] = end
                done |= left
        return found

    def note(self, keys: list[int], replica: int) -> None:
        """A prompt with these beginnings went to a replica."""
        seen = self._seen
        for key in keys:
            seen[key] = seen.pop(key, 0) | 1 << replica
        while len(seen) > self._most:
            del seen[next(iter(seen))]

    def forget(self, replica: int) -> None:
        """A replica has lost its KV."""
        kept = ~(1 << replica)
        self._seen = {key: left for key, replicas in self._seen.items() if (left := replicas & kept)}


def _places(holders: int, replicas: int) -> NDArray[np.bool_]:
    """The bits of a number, the lowest first."""
    octets = np.frombuffer(holders.to_bytes(-(-replicas // 8), "little"), np.uint8)
    return np.unpackbits(octets, count=replicas, bitorder="little").view(np.bool_)


Rule = Literal["adapters", "round-robin", "shortest-queue"]

FIRST_ANSWER_TOKENS = 128.0  # until the first answer has ended


class Router:
    """One for all replicas; its callers hold a lock. The same calls give the same choices."""

    def __init__(self, replicas: int, rule: Rule = "adapters", has_prefix_cache: bool = True) -> None:
        self.routed: Counter[tuple[int, RouteReason]] = Counter()  # requests by replica and reason
        self._rule = rule
        self._pace, self._load, self._fetch = Pace(), Mean(FIRST_LOAD_S), Mean(FIRST_FETCH_S)
        self._columns = Columns(replicas)
        self._replicas = [self._books(number) for number in range(replicas)]
        self._prefixes = PrefixIndex() if has_prefix_cache and rule == "adapters" else None
        self._at: dict[RequestId, int] = {}  # the replica of each open request
        self._last = -1  # the replica that took the last request
        self._answer_tokens = FIRST_ANSWER_TOKENS

    def add(self) -> int:
        """One more replica, which holds nothing and takes no requests until `note_up`; gives its number."""
        self._columns.add()
        self._replicas.append(self._books(len(self._replicas)))
        return len(self._replicas) - 1

    def route(self, request: Request, _now: float, without: Collection[int] = ()) -> RoutingChoice:
        """The replica for a request, which is booked there; raises RequestError if no replica is up.

        A request that is routed again was not sent to the replica before. `without` are replicas that may not have it.
        """
        hidden = [number for number in without if self._columns.is_up[number]]
        for number in hidden:
            self._columns.set_up(number, False)
        try:
            return self._route(request)
        finally:
            for number in hidden:
                self._columns.set_up(number, True)

    def _route(self, request: Request) -> RoutingChoice:
        self._unbook(request.request_id)
        answer_tokens, prefix_tokens = self._expected_tokens(request), 0
        if self._rule == "adapters":
            choice, prefix_tokens = self._cheapest(request, answer_tokens)
        elif self._rule == "shortest-queue":
            choice = self._columns.cheapest(BASE, self._prices())
        else:
            choice = self._columns.next_up(self._last)
        if choice is None:
            raise RequestError(Fault(FaultCode.ENGINE_DIED, "No replica is up; try again in a minute."))
        self._last = choice.replica
        self.routed[choice.replica, choice.reason] += 1
        self._at[request.request_id] = choice.replica
        self._replicas[choice.replica].book(request, answer_tokens, prefix_tokens)
        return choice

    def replica_of(self, request_id: RequestId) -> int | None:
        """Where an open request is."""
        return self._at.get(request_id)

    def book(self, replica: int, request: Request) -> RoutingChoice:
        """A request that is not routed here goes to this replica."""
        self._unbook(request.request_id)
        self._at[request.request_id] = replica
        self._replicas[replica].book(request, self._expected_tokens(request))
        return RoutingChoice(replica, RouteReason.ONLY_ONE)

    def note_events(self, replica: int, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                self._note_end(event)
            elif isinstance(event, EngineRestarted):
                self._forget(replica)
            elif isinstance(event, CacheFlushed) and self._prefixes is not None:
                self._prefixes.forget(replica)
        self._replicas[replica].observe(events)  # of one that is down too: it may be on its way back

    def note_down(self, replica: int) -> None:
        """A replica takes no requests, and has lost what it held."""
        self._forget(replica)
        self._replicas[replica].clear()
        self._columns.set_up(replica, False)

    def note_up(self, replica: int) -> None:
        self._columns.set_up(replica, True)

    def _books(self, number: int) -> ReplicaBooks:
        return ReplicaBooks(number, self._pace, self._load, self._fetch, self._columns)

    def _unbook(self, request_id: RequestId) -> None:
        if (before := self._at.pop(request_id, None)) is not None:
            self._replicas[before].end(request_id)

    def _note_end(self, event: Finished) -> None:
        if self._at.pop(event.request_id, None) is not None and event.output_tokens:
            self._answer_tokens += SHARE * (event.output_tokens - self._answer_tokens)

    def _forget(self, replica: int) -> None:
        for request_id in self._replicas[replica].open_requests:
            self._at.pop(request_id, None)
        if self._prefixes is not None:
            self._prefixes.forget(replica)

    def _expected_tokens(self, request: Request) -> int:
        """Most clients leave their limit large; the mean of answers says more."""
        return min(request.sampling.max_new_tokens, round(self._answer_tokens))

    def _cheapest(self, request: Request, answer_tokens: int) -> tuple[RoutingChoice | None, int]:
        """The replica with the lowest price, and the tokens of the prompt that it has computed before."""
        prefixes, columns = self._prefixes, self._columns
        keys = prefixes.keys_of(request) if prefixes is not None else []
        seen = prefixes.seen(keys, len(columns)) if prefixes is not None else None
        choice = columns.cheapest(request.adapter_id, self._prices(), answer_tokens * self._pace.step_s, seen)
        if choice and prefixes is not None:
            prefixes.note(keys, choice.replica)
        return choice, int(seen[choice.replica]) if choice and seen is not None else 0

    def _prices(self) -> Prices:
        return Prices(load_s=self._load.seconds, fetch_s=self._fetch.seconds, token_s=self._pace.token_s)
