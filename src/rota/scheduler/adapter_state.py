"""A group is one adapter with its requests: those that wait, those that run, and what they took so far."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from itertools import chain, islice

from rota.core.adapter import Adapter
from rota.core.ids import BASE, AdapterId, RequestId
from rota.scheduler.accounts import Account
from rota.scheduler.lazy_heap import LazyHeap
from rota.scheduler.queues import FairQueue
from rota.scheduler.sequence import Phase, Sequence

# ── answer lengths ──────────────────────────────────────────────────────────────────────────────────────────────────
# Answer lengths remember how long the last answers were, of one adapter or of all, and guess how long others become.

REMEMBERED = 64
# With fewer answers an adapter goes by those of all adapters.
FEW_LENGTHS = 4
# The longest of this many answers tells how long others may become. With fewer, drains cut off too many answers:
# in the mean of four seeds of `slow-disk` on an A100 E2E P99 was 27.8 s without this bound and 20.6 s with it.
TELLING_LENGTHS = 16
# An answer that is longer than all of them is expected to become as long again, and this much longer at least. The most
# that may come is taken to be twice as much at least.
LEAST_GUESS = 256


class AnswerLengths:
    """Every pass asks for means, and only the end of an answer changes them."""

    # Every adapter has one, used or not: an empty deque alone would take 600 bytes.
    __slots__ = ("_means", "_recent", "_sorted", "are_some", "longest")

    def __init__(self) -> None:
        self._recent: list[int] = []
        self._sorted: list[int] = []
        self._means: list[int] | None = None  # of the lengths from each place on, rounded up; None: to be made anew
        self.are_some = False  # no fewer than an adapter goes by
        self.longest = 0  # 0: they are too few to tell how long others may become

    def __bool__(self) -> bool:
        return bool(self._recent)

    def append(self, length: int) -> None:
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._recent.pop(0))]
        self._means = None
        self.are_some = len(self._recent) >= FEW_LENGTHS
        if len(self._recent) >= TELLING_LENGTHS:
            self.longest = self._sorted[-1]

    def mean_above(self, done: int) -> int | None:
        """The mean of the lengths above `done`, rounded up; None if there are none."""
        if self._means is None:
            self._means = self._made_means()
        place = bisect_right(self._sorted, done)
        return self._means[place] if place < len(self._means) else None

    def _made_means(self) -> list[int]:
        means, total = [], 0
        for count, length in enumerate(reversed(self._sorted), start=1):
            total += length
            means.append(-(-total // count))
        means.reverse()
        return means


# ── group ───────────────────────────────────────────────────────────────────────────────────────────────────────────

# Of the requests behind one adapter, this many count in its claim.
MOST_CLAIMING = 32
CLAIM_POWER = 2.5
# An adapter that is nearly done counts as one that needs this many tokens more.
LEAST_REST = 16


class Standing(Enum):
    """The state of an adapter between its loading and its unloading."""

    NEW = "being read for the first time"
    KNOWN = "known"
    FAILED = "known, but the last read or copy of it failed"
    RETIRING = "to be removed when it has no user; takes new ones until then"
    LEAVING = "to be removed when its last user has finished"


# Stand for the queues of every adapter that had no request yet, and stay empty. Thousands of adapters may be known, and
# few are asked for: queues of their own would take a kilobyte each.
_QUEUE, _LENGTHS = FairQueue(), AnswerLengths()
_TENANTS: LazyHeap[Account] = LazyHeap()
_SEQUENCES: list[Sequence] = []
_PRIORITIES: Counter[int] = Counter()


class Group:
    """Keeps its counts up to date; policies read them through `policy.views.AdapterView`.

    It has queues of its own from its first request on.
    """

    __slots__ = (
        "adapter",
        "adapter_id",
        "attained",
        "blocks",
        "copy_s",
        "decoding",
        "former",
        "is_pinned",
        "lengths",
        "pooled",
        "prefilling",
        "priorities",
        "queue",
        "ran_at",
        "ran_in",
        "rowless",
        "running",
        "slot_since",
        "standing",
        "steps",
        "steps_before",
        "tenants",
        "users",
        "weight",
    )

    def __init__(self, adapter: Adapter | None, pooled: AnswerLengths, former: AdapterId | None = None) -> None:
        """`pooled` has the lengths of all adapters' answers."""
        self.adapter = adapter  # None for the base model, which is never read or copied
        self.former = former  # a version whose place it takes: it comes into a slot before it counts as added
        self.adapter_id: AdapterId = adapter.adapter_id if adapter else BASE
        self.weight = adapter.weight if adapter else 1.0
        self.is_pinned = adapter.is_pinned if adapter else False
        self.standing = Standing.NEW if adapter else Standing.KNOWN
        self.queue = _QUEUE
        self.tenants = _TENANTS  # with open requests here, most first and then by name
        self.prefilling = _SEQUENCES  # all three lists are sorted by arrival, so the newest is last
        self.decoding = _SEQUENCES
        self.rowless = _SEQUENCES  # they hold KV, and their rows were given to other sequences
        self.priorities = _PRIORITIES  # of the sequences in these lists
        self.lengths = _LENGTHS  # of answers that ended by themselves
        self.pooled = pooled
        self.ran_at = 0.0
        self.ran_in = 0  # the last step that its sequences were in
        self.slot_since = 0.0
        self.copy_s = 0.0  # how long its last copy into a slot took; adapters differ in rank
        self.steps = 0
        self.steps_before = 0  # of these, the steps before it got its present slot
        self.blocks = 0  # KV blocks that its sequences hold
        self.attained = 0  # tokens computed for this adapter in all
        self.users = 0  # its open requests
        self.running = 0  # those of them that hold KV

    @property
    def waiting(self) -> int:
        return self.users - self.running

    @property
    def rows(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def is_leaving(self) -> bool:
        return self.standing in (Standing.RETIRING, Standing.LEAVING)

    @property
    def main_account(self) -> Account | None:
        """The tenant with most open requests here: the slot of this adapter counts as its slot."""
        return self.tenants.first()

    @property
    def wants_slot(self) -> bool:
        return bool(self.users) or (self.is_pinned and self.standing is Standing.KNOWN)

    @property
    def oldest_at(self) -> float:
        first = self.queue.first()
        return first.arrival[0] if first else math.inf

    @property
    def first_token_due_at(self) -> float:
        begun = self.prefilling if not self.rowless else chain(self.prefilling, self.rowless)
        firsts = (one.arrival[0] for one in begun if one.phase is Phase.PREFILL and not one.output_length)
        return min(min(firsts, default=math.inf), self.oldest_at)

    @property
    def priority(self) -> int:
        first = self.queue.first()
        own = (first.request.priority,) if first else ()
        return max((*self.priorities, *own), default=0)

    @property
    def remaining(self) -> int:
        return max((self.expected_tokens(sequence) for sequence in self.running_sequences()), default=0)

    @property
    def prompt_left(self) -> int:
        return max((len(sequence.tokens) - sequence.planned for sequence in self.prefilling), default=0)

    @property
    def most_remaining(self) -> int:
        return max(map(self.most_tokens, self.running_sequences()), default=0)

    @property
    def seated_in(self) -> int:
        return min((sequence.seated_in for sequence in self.running_sequences()), default=self.steps)

    @property
    def first_arrival(self) -> float:
        lists = (self.prefilling, self.decoding, self.rowless)
        firsts = [sequences[0].arrival[0] for sequences in lists if sequences]
        return min([*firsts, self.oldest_at])

    @property
    def is_prefilling(self) -> bool:
        return bool(self.prefilling) or any(one.phase is Phase.PREFILL for one in self.rowless)

    @property
    def stands_since(self) -> float:
        given = (one.read_until for one in self.running_sequences() if one.given and one.pooling is None)
        return min(given, default=math.inf)

    @property
    def turn_steps(self) -> int:
        return self.steps - self.steps_before

    def claim(self, now: float) -> float:
        if not self.users:
            return 0.0
        users: list[Sequence] = []
        rest = LEAST_REST
        for sequences in (self.decoding, self.prefilling, self.rowless):
            if sequences:
                # The longest of the first requests of each kind tells about how long the adapter needs a slot.
                rest = max(rest, self.expected_tokens(sequences[0]))
                users += sequences
        if first := self.queue.first():
            rest = max(rest, self.expected_tokens(first))
            users += islice(self.queue, max(0, MOST_CLAIMING - len(users)))
        ages = [now - user.arrival[0] for user in users[:MOST_CLAIMING]]
        return math.fsum([(age + 1.0 if age > 0.0 else 1.0) ** CLAIM_POWER for age in ages]) / rest

    def expected_tokens(self, sequence: Sequence) -> int:
        """Tokens still to come, by the mean of earlier answers that became longer than this one; at most the limit."""
        length = len(sequence.tokens)
        done = length - sequence.prompt_length
        # Clients ask for 4096 tokens and stop at 200: earlier answers tell more than the limit does.
        mean = (self.lengths.are_some and self.lengths.mean_above(done)) or self.pooled.mean_above(done)
        rest, most = mean - done if mean else max(LEAST_GUESS, done), sequence.limit - length
        return rest if rest < most else most

    def most_tokens(self, sequence: Sequence) -> int:
        """As `expected_tokens`, but by the longest of earlier answers; a few answers say nothing about that."""
        length = len(sequence.tokens)
        done = length - sequence.prompt_length
        rest = (self.lengths.longest or self.pooled.longest) - done
        return min(sequence.limit - length, rest if rest > 0 else max(2 * LEAST_GUESS, done))

    def running_sequences(self) -> Iterator[Sequence]:
        yield from self.prefilling
        yield from self.decoding
        yield from self.rowless

    def enter(self, account: Account) -> None:
        """A tenant has one open request more here."""
        if self.queue is _QUEUE:
            self._open_books()
        self.users += 1
        if self._count(account, 1) == 1 and self.adapter is not None:
            account.adapters[self.adapter_id] = None

    def _open_books(self) -> None:
        self.queue, self.tenants, self.lengths = FairQueue(), LazyHeap(), AnswerLengths()
        self.prefilling, self.decoding, self.rowless = [], [], []
        self.priorities = Counter()

    def exit(self, account: Account) -> None:
        self.users -= 1
        if not self._count(account, -1):
            account.adapters.pop(self.adapter_id, None)

    def _count(self, account: Account, more: int) -> int:
        """A tenant has so many open requests more here; tells how many it has now."""
        count = more - (self.tenants.order_of(account)[0] if account in self.tenants else 0)
        if count:
            self.tenants.put(account, (-count, account.name))
        else:
            self.tenants.remove(account)
        return count

    def join(self, sequence: Sequence, phase: Phase) -> None:
        """Take part in steps from now on."""
        sequence.phase = phase
        if phase is Phase.PREFILL:
            sequence.seated_in = self.steps
        self.running += 1
        self.priorities[sequence.request.priority] += 1
        insort(self.prefilling if phase is Phase.PREFILL else self.decoding, sequence, key=arrival)

    def part(self, sequence: Sequence) -> None:
        if sequence.row is None:
            self.rowless.remove(sequence)
        else:
            (self.prefilling if sequence.phase is Phase.PREFILL else self.decoding).remove(sequence)
        self.running -= 1
        priority = sequence.request.priority
        self.priorities[priority] -= 1
        if not self.priorities[priority]:
            del self.priorities[priority]

    def lose_row(self, sequence: Sequence) -> None:
        """Take part in no step, and keep the KV, until there is a row again."""
        self.part(sequence)
        sequence.row = None
        self.take_rowless(sequence)

    def take_rowless(self, sequence: Sequence) -> None:
        """A sequence that holds KV and has no row."""
        self.running += 1
        self.priorities[sequence.request.priority] += 1
        insort(self.rowless, sequence, key=arrival)


def arrival(sequence: Sequence) -> tuple[float, RequestId]:
    return sequence.arrival
