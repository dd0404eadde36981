"""Turns decide, once a pass, which adapters sit in the device's slots: the one place that knows what a slot costs."""

from __future__ import annotations

import math

from rota.core.events import SlotChanged, SlotState
from rota.core.ids import AdapterId
from rota.core.plan import Load
from rota.policy.drainer import LoRADrainer
from rota.policy.rotation import LoRARotation
from rota.scheduler.admission import Admission
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft
from rota.scheduler.group import Group, Standing


class Turns:
    """Empty slots first, then idle tenants', then what the policy takes from the busy."""

    def __init__(
        self,
        books: Books,
        admission: Admission,
        drainer: LoRADrainer | None,
        rotation: LoRARotation | None,
        is_overlapped: bool,
    ) -> None:
        self._books = books
        self._admission = admission
        self._drainer = drainer
        self._rotation = rotation
        self._is_overlapped = is_overlapped

    def take(self, draft: Draft) -> None:
        books = self._books
        if self._drainer:
            self._drain(draft, self._drainer)
        if not books.absent:
            return
        reserved = self._drainer.reserved(draft.now) if self._drainer else frozenset()
        idle = self._idle()
        # The fast way out when nothing can change hands, however many wait.
        if not books.slots.empty and not idle and not (self._rotation and self._is_turn_over(draft, self._rotation)):
            return
        claimants = [group for group in books.absent.values() if self._is_at_hand(draft, group)]
        claimants.sort(key=lambda group: (group.adapter_id not in reserved, _since(group), group.adapter_id))
        kept = len([group for group in claimants if group.adapter_id in reserved])
        left = []
        for group in claimants:
            is_reserved = group.adapter_id in reserved
            if books.slots.empty > (0 if is_reserved else kept):
                self._move_in(draft, group, "a slot was empty")
            elif leaver := self._leaver(idle, group, is_reserved):
                idle.remove(leaver)
                self._move_out(draft, leaver, "idle")
                self._move_in(draft, group, "a tenant was idle")
            else:
                left.append(group)
                continue
            kept -= is_reserved
        if left and self._rotation:
            self._rotate(draft, left, self._rotation)

    # ── the one capacity question ────────────────────────────────────────────────────────────────────────────────

    def _tenants(self) -> list[Group]:
        """Those that may leave at all: ready, not pinned, not leaving already, not about to run for the first time."""
        tenants = []
        for adapter_id, tenancy in self._books.slots.tenancies.items():
            group = self._books.groups[adapter_id]
            if not tenancy.is_ready or group.is_pinned or self._books.slots.is_replaced(adapter_id):
                continue
            if tenancy.has_run or not self._can_work(group):
                tenants.append(group)
        return tenants

    def _idle(self) -> list[Group]:
        """Tenants of whom nothing runs: they can leave and disturb nobody."""
        return [group for group in self._tenants() if not group.running]

    def _can_work(self, group: Group) -> bool:
        """Would it run if it were in a slot? It holds KV already, or there is KV for its first request."""
        return bool(group.running or ((first := group.queue.first()) and self._admission.has_room(first)))

    def _leaver(self, idle: list[Group], comer: Group, is_reserved: bool) -> Group | None:
        """The idle tenant that makes room for `comer`, if one should."""
        unused = [group.adapter_id for group in idle if not group.users]
        if unused:
            return self._books.groups[self._books.slots.first_to_leave(unused)]
        if not self._can_work(comer):
            return None
        later = [
            group
            for group in idle
            if is_reserved or group.oldest_at > _since(comer) or not self._can_work(group)
        ]
        return max(later, key=lambda group: (group.oldest_at, group.adapter_id), default=None)

    # ── policies ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _drain(self, draft: Draft, drainer: LoRADrainer) -> None:
        """Let the drainer see who is blocked by slots alone, and who sits in them."""
        books = self._books
        if not books.absent and not drainer.draining_for and not drainer.reserved(draft.now):
            return
        blocked = {
            adapter_id: group
            for adapter_id, group in books.absent.items()
            if (first := group.queue.first()) and self._admission.has_room(first)
        }
        residents = {
            adapter_id: books.groups[adapter_id]
            for adapter_id, tenancy in books.slots.tenancies.items()
            if tenancy.is_ready
        }
        loading = len(books.slots.tenancies) - len(residents)
        drainer.observe(blocked, residents, books.slots.empty + len(self._idle()) + loading, draft.now)
        for group in blocked.values():
            if (starving_at := drainer.starving_at(group)) >= draft.now:
                draft.ask_again(math.nextafter(starving_at, math.inf))  # strictly over the threshold
        draft.ask_again(drainer.reserved_until)

    def _is_turn_over(self, draft: Draft, rotation: LoRARotation) -> bool:
        over_at = min((rotation.turn_over_at(tenant) for tenant in self._tenants()), default=float("inf"))
        if over_at > draft.now:
            draft.ask_again(over_at)
        return over_at <= draft.now

    def _rotate(self, draft: Draft, claimants: list[Group], rotation: LoRARotation) -> None:
        # Nobody steps aside for a request that could not start anyway.
        able = [group for group in claimants if self._can_work(group)]
        for turn in rotation.turns(self._tenants(), able, draft.now):
            if not self._is_overlapped:
                self._move_out(draft, self._books.groups[turn.leaver], "its turn is over")
                self._move_in(draft, self._books.groups[turn.comer], "its turn has come")
            elif self._books.slots.has_landing:
                self._move_in(draft, self._books.groups[turn.comer], "its turn has come", replaces=turn.leaver)

    # ── moving ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _is_at_hand(self, draft: Draft, group: Group) -> bool:
        """Does it lie in host memory? If not, have it fetched."""
        books = self._books
        if group.standing is Standing.NEW or books.hosts.is_fetching(group.adapter_id):
            return False
        if books.hosts.has(group.adapter_id):
            return True
        self.fetch(draft, group)
        return False

    def fetch(self, draft: Draft, group: Group) -> None:
        """Order an adapter to be read into host memory, at the cost of another if that is full."""
        books = self._books
        assert group.adapter is not None
        victim = books.hosts.begin_fetch(group.adapter_id, lambda other: bool(books.groups[other].users))
        if victim is not None:
            draft.drops.append(victim)
        draft.fetches.append(group.adapter)

    def _move_in(self, draft: Draft, group: Group, reason: str, replaces: AdapterId | None = None) -> None:
        books = self._books
        slot = books.slots.begin_load(group.adapter_id, replaces)
        books.hosts.use(group.adapter_id)
        books.note_users(group)
        draft.loads.append(Load(group.adapter_id, slot, is_awaited=not self._is_overlapped))
        books.outbox.append(SlotChanged(draft.now, slot, group.adapter_id, SlotState.LOADING, reason))
        if not self._is_overlapped:
            arrive(books, group.adapter_id, draft.now)

    def _move_out(self, draft: Draft, group: Group, reason: str) -> None:
        vacate(self._books, group, draft.now, reason)


def arrive(books: Books, adapter_id: AdapterId, at: float) -> None:
    """An adapter's weights are in their slot; whom it replaces leaves."""
    group = books.groups[adapter_id]
    leaver = books.slots.finish_load(adapter_id)
    group.slot_since = at
    slot = books.slots.tenancies[adapter_id].slot
    books.outbox.append(SlotChanged(at, slot, adapter_id, SlotState.READY))
    if leaver is not None and not group.users:
        # Those it came for are gone: nobody steps aside for an empty chair.
        vacate(books, group, at, "called off")
    elif leaver is not None:
        vacate(books, books.groups[leaver], at, "its turn is over")
    else:
        books.note_slots()


def vacate(books: Books, group: Group, at: float, reason: str) -> None:
    """A slot is free from now on; its former tenant's sequences are parked."""
    slot = books.slots.vacate(group.adapter_id)
    books.note_users(group)
    books.note_slots()
    books.outbox.append(SlotChanged(at, slot, group.adapter_id, SlotState.EMPTY, reason))


def _since(group: Group) -> float:
    """Since when a claimant has been kept waiting: for a first token, or for the next."""
    return min(group.first_token_due_at, group.ran_at if group.running else float("inf"))
