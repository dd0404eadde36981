"""The scheduler's state holds every queue and ledger, and the few moves that touch several of them at once."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter

from rota.core.capacity import Capacity
from rota.core.errors import Fault
from rota.core.events import Event, Finished, FinishReason, Preempted
from rota.core.ids import BASE, FIRST_ENGINE, AdapterId, EngineId, RequestId
from rota.core.request import Request
from rota.policy.eviction import Eviction
from rota.scheduler.accounts import Accounts
from rota.scheduler.adapter_state import AnswerLengths, Group, Standing
from rota.scheduler.blocks import BlockLedger
from rota.scheduler.hosts import HostLedger
from rota.scheduler.lazy_heap import LazyHeap
from rota.scheduler.plan_builder import PlanBuilder
from rota.scheduler.rows import RowLedger
from rota.scheduler.sequence import Arrival, Phase, Reason, Refusal, Sequence
from rota.scheduler.slots import SlotLedger

# ── due queue ───────────────────────────────────────────────────────────────────────────────────────────────────────
# The due queue keeps adapters that have work and no slot in the order in which they are due.

Place = tuple[float, AdapterId, Group]  # no two places share the first two, so groups are never compared
_GROUP: Callable[[Place], Group] = itemgetter(2)


class DueQueue:
    """Always sorted, so that the next few adapters are found without a look at all of them."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._due_at: dict[AdapterId, float] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, adapter_id: AdapterId) -> bool:
        return adapter_id in self._due_at

    def __iter__(self) -> Iterator[Group]:
        """First due first, as the queue is now: a group that comes or goes meanwhile changes nothing."""
        return map(_GROUP, self._places.copy())

    def get(self, adapter_id: AdapterId) -> Group | None:
        due_at = self._due_at.get(adapter_id)
        return None if due_at is None else self._places[bisect_left(self._places, (due_at, adapter_id))][2]

    def rank(self, adapter_id: AdapterId) -> int:
        """How many groups come before one of them."""
        return bisect_left(self._places, (self._due_at[adapter_id], adapter_id))

    def later_than(self, due_at: float, adapter_id: AdapterId) -> Iterator[Group]:
        """The groups behind this place in the queue."""
        for _, _, group in self._places[bisect_left(self._places, (due_at, adapter_id + 1)) :]:
            yield group

    def last(self, most: int) -> list[Group]:
        """The groups that are due last, the very last first."""
        return [group for _, _, group in self._places[: -most - 1 : -1]]

    def place(self, group: Group, due_at: float) -> None:
        """Put a group into the queue, or move it to where it belongs now."""
        if self._due_at.get(group.adapter_id) != due_at:
            DueQueue.remove(self, group)  # not out of the other orders of `Absent`
            self._due_at[group.adapter_id] = due_at
            insort(self._places, (due_at, group.adapter_id, group))

    def remove(self, group: Group) -> None:
        due_at = self._due_at.pop(group.adapter_id, None)
        if due_at is not None:
            del self._places[bisect_left(self._places, (due_at, group.adapter_id))]


# ── absent ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# The absent adapters have work and no slot; they are kept in every order in which a slot policy looks at them.


class Absent(DueQueue):
    """Itself sorted by when the slot policy says that an adapter is due. The other orders hold some or all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.parked = DueQueue()  # adapters that hold KV, in the same order
        self.at_hand = DueQueue()  # adapters whose weights lie in host memory, in the same order
        # Known adapters whose weights neither lie in host memory nor are on their way there. A read that begins takes
        # its adapter out, and `put` notes all other changes.
        self.missing: set[AdapterId] = set()
        self.stalest = DueQueue()  # adapters that hold KV, the longest without a step first
        self.newcomers = DueQueue()  # adapters that wait for a first token, first come first
        self.oldest = DueQueue()  # the adapter with the oldest open request first
        self.largest = DueQueue()  # the adapter with most open requests first

    def put(self, group: Group, due_at: float, is_at_hand: bool, is_missing: bool) -> None:
        """Put a group into every order that it belongs to, or move it to where it belongs now."""
        self.place(group, due_at)
        self.oldest.place(group, group.first_arrival)
        self.largest.place(group, -group.users)
        _place(self.newcomers, group, group.first_token_due_at)
        self.at_hand.place(group, due_at) if is_at_hand else self.at_hand.remove(group)
        (self.missing.add if is_missing else self.missing.discard)(group.adapter_id)
        _place(self.parked, group, due_at if group.running else math.inf)
        _place(self.stalest, group, group.ran_at if group.running else math.inf)

    def remove(self, group: Group) -> None:
        if group.adapter_id not in self:
            return
        super().remove(group)
        for order in (self.parked, self.at_hand, self.stalest, self.newcomers, self.oldest, self.largest):
            order.remove(group)
        self.missing.discard(group.adapter_id)


def _place(order: DueQueue, group: Group, at: float) -> None:
    order.place(group, at) if at < math.inf else order.remove(group)


# ── group sizes ─────────────────────────────────────────────────────────────────────────────────────────────────────
# Group sizes count each adapter's sequences that hold KV, and how many of them could be in slots at the same time.


class GroupSizes:
    """Sizes only, without names: the largest ones matter, as many as there are slots."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._sizes: list[int] = []  # ascending, of adapters with such sequences
        self.most = 0  # the sum of the largest ones

    def most_after(self, size: int) -> int:
        """What `most` would be if an adapter of this size had one sequence more."""
        return self.most + self._counts(bisect_right(self._sizes, size) - 1 if size else -1)

    def grow(self, size: int) -> None:
        """An adapter of this size has one sequence more."""
        if not size:
            self._sizes.insert(0, 0)
        # Of equal sizes the last one grows and the first one shrinks, so the order stays.
        place = bisect_right(self._sizes, size) - 1
        self.most += self._counts(place)
        self._sizes[place] += 1

    def shrink(self, size: int) -> None:
        """An adapter of this size has one sequence less."""
        place = bisect_left(self._sizes, size)
        self.most -= self._counts(place)
        self._sizes[place] -= 1
        if not self._sizes[place]:
            del self._sizes[place]

    def _counts(self, place: int) -> bool:
        """Is it one of the largest?"""
        return place >= len(self._sizes) - self._slots


# ── state ───────────────────────────────────────────────────────────────────────────────────────────────────────────

# The mean times of steps and of copies cover about this many.
REMEMBERED_STEPS = 16
REMEMBERED_COPIES = 4


class SchedulerState:
    """The scheduler's parts write it; questions read it."""

    def __init__(
        self,
        capacity: Capacity,
        eviction: Eviction,
        host_adapters: int,
        due_at: Callable[[Group], float],
        engine_id: EngineId = FIRST_ENGINE,
    ) -> None:
        """`due_at` says when a group that has no slot will have waited long enough."""
        self.engine_id = engine_id  # written into every event that is not of one request
        self.due_at = due_at
        self.rows = RowLedger(capacity.rows)
        self.blocks = BlockLedger(capacity.blocks, capacity.block_size)
        self.slots = SlotLedger(capacity.slots, eviction, capacity.pages, capacity.matrices)
        self.slot_bytes = capacity.adapter_bytes
        self.hosts = HostLedger(host_adapters)
        # Not of open slots only: the others may open while many sequences hold KV.
        self.group_sizes = GroupSizes(capacity.slots)
        self.longest = min(capacity.max_sequence_tokens, capacity.blocks * capacity.block_size)
        self.window = capacity.window
        self.deep_prefix = capacity.deep_prefix
        self.row_step = capacity.row_step
        self.short_prompts = 0  # open requests whose prompts are shorter than that
        self.lengths = AnswerLengths()  # of the last answers of all adapters
        self.base = Group(None, self.lengths)
        self.groups: dict[AdapterId, Group] = {BASE: self.base}
        self.pinned_groups: dict[AdapterId, Group] = {}
        self.sequences: dict[RequestId, Sequence] = {}  # every open one
        self.punctual: LazyHeap[Sequence] = LazyHeap()  # those that may become late, by when they do
        self.waiting = 0
        self.running_count = 0  # sequences that hold KV: those that run, and those that are parked
        self.priorities: Counter[int] = Counter()  # of the open ones
        self.step_tokens: int  # that a step may compute, at most: as the config says, or as the step times tell
        self.read_s = 0.0  # that a reader takes for a token; 0: there is no reader
        self.step_s = 0.0  # how long steps took recently
        self.copy_s = 0.0  # and copies of adapters into slots; 0 before the first one
        self.accounts = Accounts()
        # In the last pass, a tenant's requests that arrived later than this had to wait behind those that lacked KV.
        self.line_ends_at: dict[str, Arrival] = {}
        self.outbox: list[Event] = []
        self.paused_at: float | None = None  # no step computes since then; None: steps do
        # Adapters with work and no slot: those a policy may have to choose among.
        self.absent = Absent()
        self.adapter_blocks = 0  # KV blocks that adapters' sequences hold, without the base model's
        self.residents: list[Group] = []  # in a slot, with their weights
        self.open_groups = [self.base]  # whose sequences may be in a step: the base model's, and the residents'

    def group_of(self, sequence: Sequence) -> Group:
        return self.groups[sequence.request.adapter_id]

    @property
    def pinned(self) -> set[str]:
        """The names of pinned adapters. Two versions of one name count once."""
        return {group.adapter.name for group in self.pinned_groups.values() if group.adapter}

    def is_open(self, group: Group) -> bool:
        """May the sequences of a group be in a step?"""
        residency = self.slots.residencies.get(group.adapter_id)
        return group is self.base or (residency is not None and residency.is_ready)

    def running(self) -> Iterator[Sequence]:
        yield from self.base.running_sequences()
        for adapter_id in self.slots.residencies:
            yield from self.groups[adapter_id].running_sequences()
        for group in self.absent.parked:
            yield from group.running_sequences()

    def growing(self) -> set[Sequence]:
        """Sequences that need one more KV block for the next token."""
        return {
            sequence
            for group in self.open_groups
            for sequence in group.decoding
            if sequence.planned == sequence.room and sequence.planned < sequence.limit - 1
        }

    def open(self, request: Request) -> Sequence:
        """A request begins to wait."""
        # A request with pooling samples behind its prompt, as all do, and ends there: that token is not read.
        tokens = request.sampling.max_new_tokens if request.pooling is None else 1
        limit = min(len(request.prompt) + tokens, self.longest)
        account = self.accounts.open(request.tenant)
        sequence = Sequence(request, limit, account)
        self.group_of(sequence).enter(account)
        self.sequences[request.request_id] = sequence
        self.priorities[request.priority] += 1
        self.short_prompts += self.is_short(sequence)
        self.enqueue(sequence)
        return sequence

    def enqueue(self, sequence: Sequence) -> None:
        group = self.group_of(sequence)
        group.queue.push(sequence)
        self.waiting += 1
        self.note_users(group)

    def dequeue(self, sequence: Sequence) -> None:
        self.group_of(sequence).queue.remove(sequence)
        self.waiting -= 1

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        at: float,
        fault: Fault | None = None,
        embedding: tuple[float, ...] | None = None,
    ) -> None:
        """A request's last event; row, blocks and its place in the queue are free from now on."""
        group = self.group_of(sequence)
        if sequence.phase is Phase.WAITING:
            self.dequeue(sequence)
        else:
            self.stand_up(sequence)
        sequence.phase = Phase.FINISHED
        del self.sequences[sequence.request_id]
        self.punctual.remove(sequence)
        group.exit(sequence.account)
        self.accounts.close(sequence.account)
        self._forget_priority(sequence.request.priority)
        self.short_prompts -= self.is_short(sequence)
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and sequence.pooling is None:
            group.lengths.append(sequence.output_length)
            self.lengths.append(sequence.output_length)
        self.note_users(group)
        self.outbox.append(
            Finished(
                request_id=sequence.request_id,
                at=at,
                reason=reason,
                prompt_tokens=sequence.prompt_length,
                output_tokens=sequence.output_length,
                cached_tokens=sequence.cached_tokens,
                fault=fault,
                embedding=embedding,
            )
        )

    def is_short(self, sequence: Sequence) -> bool:
        return self.deep_prefix is not None and sequence.prompt_length < self.deep_prefix

    def _forget_priority(self, priority: int) -> None:
        self.priorities[priority] -= 1
        if not self.priorities[priority]:
            del self.priorities[priority]

    def preempt(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Back to the old place in the queue; the tokens stay, the KV is computed again later.

        The pass goes on, but parts of it that are over have not seen this row and these blocks free: the next one does.
        """
        self.note_readers([sequence], builder.now)
        self.stand_up(sequence)
        sequence.refusal = None
        self.enqueue(sequence)
        self.outbox.append(Preempted(sequence.request_id, builder.now))
        builder.ask_again(builder.now)

    def note_readers(self, sequences: Iterable[Sequence], at: float) -> None:
        """They take part in no step from this moment on. Until when their readers have text is noted."""
        if self.read_s:
            for sequence in sequences:
                sequence.note_reader(at, self.step_s, self.read_s)

    def stand_up(self, sequence: Sequence) -> None:
        """Give back row and blocks. A step in flight may still use them, because the device works in order."""
        group = self.group_of(sequence)
        if group is not self.base:
            self.group_sizes.shrink(group.running)
        group.part(sequence)
        if sequence.row is not None:
            self.rows.give_back(sequence.row)
            sequence.account.rows -= 1
        self.blocks.release(sequence.held_blocks)
        self.running_count -= 1
        sequence.account.seats -= 1
        self.count_blocks(sequence, -len(sequence.held_blocks))
        sequence.stand_up()

    def count_blocks(self, sequence: Sequence, blocks: int) -> None:
        """A sequence holds so many blocks more, or less; a block that several sequences share counts for each."""
        group = self.group_of(sequence)
        sequence.account.blocks += blocks
        group.blocks += blocks
        if group is not self.base:
            self.adapter_blocks += blocks

    def has_row(self, group: Group) -> bool:
        """May one more sequence of a group hold KV and run?

        Whichever adapters come into the slots, there must be a row for each of their sequences. Otherwise a sequence
        would wait for a row in its adapter's turn, for as long as the answers of others take.
        """
        if self.running_count < self.rows.total:
            return True
        if group is self.base:
            return self.base.running + 1 + self.group_sizes.most <= self.rows.total
        return self.base.running + self.group_sizes.most_after(group.running) <= self.rows.total

    def take_seat(self, sequence: Sequence) -> None:
        """A sequence that has got its blocks counts as running from now on."""
        group = self.group_of(sequence)
        if group is not self.base:
            self.group_sizes.grow(group.running)
        self.running_count += 1
        sequence.account.seats += 1
        self.count_blocks(sequence, len(sequence.blocks))

    def take_row(self, sequence: Sequence) -> None:
        """Sit down at a free row, or else at the row of a parked sequence, which keeps its blocks."""
        if not self.rows.free:
            group = self.groups[self.rows.first_to_give()]
            self.lose_row((group.decoding or group.prefilling)[-1])
            # Of all that orders absent adapters, only its rows have changed.
            self.rows.note_parked(group.adapter_id, group.rows)
        sequence.row = self.rows.take()
        sequence.account.rows += 1

    def lose_row(self, sequence: Sequence) -> None:
        """Give back the row only. A step in flight may still use it, because the device works in order."""
        assert sequence.row is not None
        group = self.group_of(sequence)
        self.rows.give_back(sequence.row)
        sequence.account.rows -= 1
        sequence.refusal = Refusal(Reason.NO_ROW.value, group.ran_at)
        group.lose_row(sequence)

    def leave_window(self, sequence: Sequence) -> None:
        """Give back the blocks that no layer sees from the next token on. A step in flight may still read them."""
        if self.window is None:
            return
        unseen = max(0, sequence.computed - self.window + 1) // self.blocks.block_size
        if unseen > sequence.given_back:
            self.blocks.release(sequence.blocks[sequence.given_back : unseen])
            self.count_blocks(sequence, sequence.given_back - unseen)
            sequence.given_back = unseen

    def note_users(self, group: Group) -> None:
        """Keep `absent` correct after a group's users, slot or place in host memory changed."""
        if group is self.base:
            return
        if group.wants_slot and group.adapter_id not in self.slots.residencies:
            is_at_hand = self.hosts.has(group.adapter_id)
            # A new adapter is first read when it is added.
            is_read = is_at_hand or group.standing is Standing.NEW or self.hosts.is_fetching(group.adapter_id)
            self.absent.put(group, self.due_at(group), is_at_hand=is_at_hand, is_missing=not is_read)
            self.slots.want(group.adapter_id, is_at_hand)
            self.rows.note_parked(group.adapter_id, group.rows)
        else:
            self.absent.remove(group)
            self.slots.want(group.adapter_id, False)
            self.rows.note_parked(group.adapter_id, 0)

    def note_step(self, step_s: float) -> None:
        self.step_s += (step_s - self.step_s) / REMEMBERED_STEPS

    def note_copy(self, adapter_id: AdapterId, copy_s: float) -> None:
        """A copy is complete. A time of 0 means that it was not measured."""
        if not copy_s:
            return
        # The first copy is no mean yet: a zero in it would make slow copies look fast.
        self.copy_s += (copy_s - self.copy_s) / (REMEMBERED_COPIES if self.copy_s else 1)
        if group := self.groups.get(adapter_id):
            group.copy_s = copy_s

    def expected_copy_s(self, group: Group) -> float:
        """How long an adapter's copy will take: as long as its last one, or else as others; 0 if none was measured."""
        return group.copy_s or self.copy_s

    def sort_absent(self) -> None:
        """Keep the order of absent adapters correct after `due_at` began to answer differently."""
        for group in self.absent:
            self.note_users(group)

    def note_slots(self) -> None:
        """Keep `residents` and `open_groups` correct after a slot changed."""
        residencies = self.slots.residencies
        self.residents = [
            self.groups[adapter_id] for adapter_id, residency in residencies.items() if residency.is_ready
        ]
        self.open_groups = [self.base, *self.residents]
