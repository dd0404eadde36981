"""Turns decide, once a pass, which adapters sit in the device's slots: the one place that knows what a slot costs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from rota.core.events import DrainChanged
from rota.core.ids import AdapterId
from rota.policy.drainer import LoRADrainer
from rota.policy.rotation import LoRARotation
from rota.scheduler.admission import LOOK_AHEAD, Admission
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft
from rota.scheduler.fetching import Fetching
from rota.scheduler.group import Group, Standing
from rota.scheduler.moves import Moves, vacate

# So many adapters without a slot are looked at to find one for whom somebody should drain.
LINE_LOOK_AHEAD = 64


class Turns:
    """Empty slots first, then idle tenants', then what the policy takes from the busy."""

    def __init__(
        self,
        books: Books,
        admission: Admission,
        fetching: Fetching,
        moves: Moves,
        drainer: LoRADrainer | None,
        rotation: LoRARotation | None,
    ) -> None:
        self._books = books
        self._admission = admission
        self._fetching = fetching
        self._moves = moves
        self._drainer = drainer
        self._rotation = rotation

    def take(self, draft: Draft) -> None:
        if self._drainer:
            self._drain(draft, self._drainer)
        if not self._books.absent:
            return
        if self._rotation:
            self._watch_the_round(self._rotation)
        idle = self._idle()
        if idle or self._books.slots.empty:
            self._fill(draft, idle)
        if self._rotation and self._books.absent:
            self._rotate(draft, self._rotation)

    # ── the one capacity question ────────────────────────────────────────────────────────────────────────────────

    def _may_leave(self, group: Group) -> bool:
        """A tenant that is not pinned, not leaving already and not about to run for the first time."""
        slots = self._books.slots
        if group.is_pinned or slots.is_replaced(group.adapter_id):
            return False
        return slots.tenancies[group.adapter_id].has_run or not self._admission.can_work(group)

    def _idle(self) -> list[Group]:
        """Tenants of whom nothing runs: they can leave and disturb nobody."""
        return [group for group in self._books.tenants if not group.running and self._may_leave(group)]

    # ── without taking from anyone ───────────────────────────────────────────────────────────────────────────────

    def _fill(self, draft: Draft, idle: list[Group]) -> None:
        """Give away empty slots and those of idle tenants."""
        books = self._books
        reserved = self._drainer.reserved if self._drainer else frozenset()
        kept = sum(adapter_id in books.absent for adapter_id in reserved)  # only those they are reserved for may have
        for group in self._line(draft, idle, reserved):
            is_reserved = group.adapter_id in reserved
            if books.slots.empty + len(idle) <= (0 if is_reserved else kept):
                return
            if not self._fetching.is_at_hand(draft, group):
                continue
            if books.slots.empty:
                self._moves.move_in(draft, group, "a slot was empty")
            elif leaver := self._leaver(idle, group, is_reserved):
                idle.remove(leaver)
                vacate(books, leaver, draft.now, "idle")
                self._moves.move_in(draft, group, "a tenant was idle")
            elif not is_reserved and self._admission.can_work(group):
                return  # whoever comes later has no better claim
            else:
                continue
            kept -= is_reserved

    def _line(self, draft: Draft, idle: list[Group], reserved: frozenset[AdapterId]) -> Iterator[Group]:
        """Those a slot is kept for; then anybody while nobody has a use for some slot; then whoever could start."""
        books = self._books
        yield from (books.groups[adapter_id] for adapter_id in sorted(reserved) if adapter_id in books.absent)
        for group in self._at_hand(draft):
            if not books.slots.empty and all(tenant.users for tenant in idle):
                break
            yield group
        yield from self._able(draft)

    def _at_hand(self, draft: Draft) -> Iterator[Group]:
        """Whose weights lie in host memory, first due first; the others are fetched while there is room for them."""
        books, refused = self._books, 0
        for group in books.absent:
            if self._fetching.is_at_hand(draft, group):
                yield group
            elif group.standing is not Standing.NEW and not books.hosts.is_fetching(group.adapter_id):
                refused += 1
            if refused == LOOK_AHEAD:
                # Of a thousand behind them only those are worth a look that are there, or need no KV any more.
                near = {*books.hosts.held, *(parked.adapter_id for parked in books.parked)}
                behind = books.absent.later_among(near, books.due_at(group), group.adapter_id)
                yield from (one for one in behind if self._fetching.is_at_hand(draft, one))
                return

    def _able(self, draft: Draft) -> Iterator[Group]:
        """Who lacks nothing but a slot, first due first; after a few who lack KV too, only those who hold some."""
        books, lacking = self._books, 0
        for group in self._at_hand(draft):
            if self._admission.can_work(group):
                yield group
            elif (lacking := lacking + 1) == LOOK_AHEAD:
                behind = books.parked.later_than(books.due_at(group), group.adapter_id)
                yield from (one for one in behind if self._fetching.is_at_hand(draft, one))
                return

    def _leaver(self, idle: list[Group], comer: Group, is_reserved: bool) -> Group | None:
        """The idle tenant that makes room for `comer`, if one should."""
        unused = [group.adapter_id for group in idle if not group.users]
        if unused:
            return self._books.groups[self._books.slots.first_to_leave(unused)]
        if not self._admission.can_work(comer):
            return None
        due_at = self._books.due_at(comer)
        later = [
            group for group in idle if is_reserved or group.oldest_at > due_at or not self._admission.can_work(group)
        ]
        return max(later, key=lambda group: (group.oldest_at, group.adapter_id), default=None)

    # ── policies ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _drain(self, draft: Draft, drainer: LoRADrainer) -> None:
        """Let the drainer see who is blocked by slots alone, and who sits in them."""
        books = self._books
        beneficiaries = drainer.beneficiaries
        if not books.absent and not beneficiaries and not drainer.news:
            return
        # A drain goes on while KV is short for a moment: starting anew would give its victim a later deadline.
        blocked = {
            adapter_id: books.groups[adapter_id]
            for adapter_id in beneficiaries
            if adapter_id in books.absent and books.groups[adapter_id].waiting
        }
        enough, lacking = len(blocked) + drainer.most_drains, 0
        for group in books.absent:  # longest wait first
            if (starving_at := drainer.starving_at(group)) >= draft.now:
                draft.ask_again(math.nextafter(starving_at, math.inf))  # strictly over the threshold
                break
            if len(blocked) == enough or lacking == LINE_LOOK_AHEAD:
                break
            if (first := group.queue.first()) and self._admission.has_room(first):
                blocked[group.adapter_id] = group
            else:
                lacking += 1
        blocked |= {group.adapter_id: group for group in self._urgent()}
        residents = {group.adapter_id: group for group in books.tenants}
        drainer.observe(blocked, residents, books.slots.empty + len(self._idle()), draft.now)
        draft.ask_again(drainer.reserved_until)
        books.outbox += [DrainChanged(draft.now, one.victim, one.beneficiary, one.state) for one in drainer.news]
        drainer.news.clear()

    def _urgent(self) -> Iterator[Group]:
        """Of the first in line those who go before some tenant and lack nothing but a slot."""
        books = self._books
        if len(books.priorities) < 2:
            return
        least = min((group.priority for group in books.tenants), default=math.inf)
        for group in islice(books.absent, LINE_LOOK_AHEAD):
            first = group.queue.first()
            if first and first.request.priority > least and self._admission.has_room(first):
                yield group

    def _watch_the_round(self, rotation: LoRARotation) -> None:
        """Let rotation see how long a round of turns takes; everybody's due date may depend on it."""
        before_s = rotation.stall_limit_s
        rotation.observe(len(self._books.absent), self._books.step_s)
        if rotation.stall_limit_s != before_s:
            self._books.line_up_again()

    def _rotate(self, draft: Draft, rotation: LoRARotation) -> None:
        """Those whose turn is over make room for those who deserve it more."""
        slots, now = self._books.slots, draft.now
        landings = slots.landings if self._moves.is_overlapped else slots.total
        if not landings:
            return
        leaving = []
        for group in self._books.tenants:
            if (over_at := rotation.turn_over_at(group)) > now:
                draft.ask_again(over_at)
            elif self._may_leave(group):
                leaving.append(group)
        if not leaving:
            return
        coming = self._coming(draft, min(landings, len(leaving)))
        for turn in rotation.turns(leaving, coming, now)[:landings]:
            leaver, comer = self._books.groups[turn.leaver], self._books.groups[turn.comer]
            if self._moves.is_overlapped:
                self._moves.move_in(draft, comer, "its turn has come", replaces=turn.leaver)
            else:
                vacate(self._books, leaver, now, "its turn is over")
                self._moves.move_in(draft, comer, "its turn has come")

    def _coming(self, draft: Draft, most: int) -> list[Group]:
        """Enough of those who are due to choose `most` from, or all who could come if so many are not due."""
        coming: list[Group] = []
        for group in self._able(draft):  # nobody steps aside for a request that could not start anyway
            coming.append(group)
            if len(coming) == most and self._books.due_at(group) <= draft.now:
                break
        return coming
