"""The router chooses a replica for each request, by what messages and events tell of the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import CacheFlushed, EngineRestarted, Event, Finished
from rota.core.ids import BASE, RequestId
from rota.core.messages import Message, Submit
from rota.core.request import Request
from rota.policy.routing import Choice, Prices, in_turn, route, shortest_queue
from rota.runtime.prefix_index import PrefixIndex
from rota.runtime.replica_books import ReplicaBooks

ROUTERS = ("adapters", "round-robin", "shortest-queue")

# What counts until something was measured.
FIRST_LOAD_S, FIRST_FETCH_S, FIRST_ANSWER_TOKENS = 0.002, 0.05, 128.0
# A new measurement's share in the mean.
SHARE = 0.05


class Router:
    """One for all replicas; its callers hold a lock. The same calls give the same choices."""

    def __init__(self, replicas: int, rule: str = "adapters", has_prefix_cache: bool = True) -> None:
        self._replicas = [ReplicaBooks(number) for number in range(replicas)]
        self._views = [replica.view for replica in self._replicas]
        self._choose: Callable[[Request], Choice | None] = {
            "adapters": self._by_price,
            "round-robin": self._in_turn,
            "shortest-queue": self._by_queue,
        }[rule]
        self._prefixes = PrefixIndex() if has_prefix_cache else None
        self._at: dict[RequestId, int] = {}
        self._last = -1  # the replica that took the last request
        self._load_s, self._answer_tokens = FIRST_LOAD_S, FIRST_ANSWER_TOKENS

    def route(self, request: Request, _now: float) -> Choice:
        """The replica for a request, which is booked there; raises RequestError if no replica is up."""
        choice = self._choose(request)
        if choice is None:
            raise RequestError(Fault(FaultCode.ENGINE_DIED, "No replica is up; try again later."))
        self._last = choice.replica
        self._book(request, choice.replica)
        return choice

    def replica_of(self, request_id: RequestId) -> int | None:
        """Where an open request is."""
        return self._at.get(request_id)

    def note_message(self, replica: int, message: Message) -> None:
        """A replica was sent a message. A request that was routed is booked already."""
        if isinstance(message, Submit) and message.request.request_id not in self._at:
            self._book(message.request, replica)

    def note_events(self, replica: int, events: Sequence[Event]) -> None:
        books = self._replicas[replica]
        for event in events:
            if isinstance(event, Finished) and self._at.pop(event.request_id, None) is not None:
                if event.output_tokens:
                    self._answer_tokens += SHARE * (event.output_tokens - self._answer_tokens)
            elif isinstance(event, EngineRestarted):
                self._forget(replica)
            elif isinstance(event, CacheFlushed) and self._prefixes:
                self._prefixes.forget(replica)
        for load_s in books.observe(events):
            self._load_s += SHARE * (load_s - self._load_s)

    def note_down(self, replica: int) -> None:
        """A replica takes no requests, and has lost what it held."""
        self._forget(replica)
        self._replicas[replica].clear()
        self._views[replica].is_up = False

    def note_up(self, replica: int) -> None:
        self._views[replica].is_up = True

    def _forget(self, replica: int) -> None:
        for request_id in self._replicas[replica].open_requests:
            self._at.pop(request_id, None)
        if self._prefixes:
            self._prefixes.forget(replica)

    def _book(self, request: Request, replica: int) -> None:
        answer_tokens = min(request.sampling.max_new_tokens, round(self._answer_tokens))
        self._replicas[replica].book(request, answer_tokens)
        self._at[request.request_id] = replica

    def _by_price(self, request: Request) -> Choice | None:
        adapter_id = request.adapter_id
        for books in self._replicas:
            view = books.view
            view.queue_s = books.queue_s
            view.has_slot = adapter_id in books.slots
            view.has_host_copy = adapter_id in books.hosts
        keys = self._look_up(request)
        choice = route(self._views, self._prices(), adapter_id != BASE)
        if keys and choice and self._prefixes:
            self._prefixes.note(keys, choice.replica)
        return choice

    def _look_up(self, request: Request) -> list[int]:
        """Fill in what each replica has of the prompt; gives the names of its beginnings."""
        if self._prefixes is None:
            return []
        for view in self._views:
            view.prefix_tokens = 0
        keys = self._prefixes.keys_of(request)
        for tokens, replicas in self._prefixes.holders(keys):
            for view in self._views:
                if replicas >> view.number & 1:
                    view.prefix_tokens = tokens
        return keys

    def _prices(self) -> Prices:
        token_s = min(books.pace.token_s for books in self._replicas)
        return Prices(load_s=self._load_s, fetch_s=FIRST_FETCH_S, token_s=token_s)

    def _by_queue(self, _request: Request) -> Choice | None:
        for books in self._replicas:
            books.view.queue_s = books.queue_s
        return shortest_queue(self._views)

    def _in_turn(self, _request: Request) -> Choice | None:
        return in_turn(self._views, self._last)
