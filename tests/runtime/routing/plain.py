"""A router that holds every choice against the plain rule, with a view of every replica made from its books."""

from __future__ import annotations

from rota.core.ids import BASE
from rota.core.request import Request
from rota.policy.routing import ReplicaView, RoutingChoice, route
from rota.runtime.replicas.replica_state import ReplicaBooks
from rota.runtime.replicas.router import ENDS, PrefixIndex, Router


class PlainlyChecked(Router):
    """Fails where the columns say something else than `policy.routing.route`."""

    checked = 0

    def _cheapest(self, request: Request, answer_tokens: int) -> tuple[RoutingChoice | None, int]:
        plain = self.plain(request, answer_tokens)
        found = super()._cheapest(request, answer_tokens)
        assert found[0] == plain
        self.checked += 1
        return found

    def plain(self, request: Request, answer_tokens: int) -> RoutingChoice | None:
        views = [self._view(books, request, answer_tokens) for books in self._replicas]
        return route(views, self._prices(), request.adapter_id != BASE)

    def _view(self, books: ReplicaBooks, request: Request, answer_tokens: int) -> ReplicaView:
        adapter_id, number = request.adapter_id, books.view.number
        is_busy = adapter_id in books.busy
        in_line = len(books.busy) + (not is_busy) - books.slot_count if books.slot_count else 0
        answer_s = answer_tokens * self._pace.step_s
        return ReplicaView(
            number=number,
            is_up=books.view.is_up,
            queue_s=books.queue_s,
            pause_s=0.5 * in_line / books.slot_count * answer_s if in_line > 0 else 0.0,
            has_slot=is_busy or adapter_id in books.slots,
            has_host_copy=adapter_id in books.hosts,
            prefix_tokens=seen_by(self._prefixes, request, number) if self._prefixes is not None else 0,
        )


def seen_by(index: PrefixIndex, request: Request, replica: int) -> int:
    """How many tokens of a prompt a replica has seen: the longest beginning, if all shorter ones are known."""
    tokens = 0
    for end, key in zip(ENDS, index.keys_of(request), strict=False):
        holders = index._seen.get(key, 0)
        if not holders:
            break
        tokens = end if holders >> replica & 1 else tokens
    return tokens
